"""The worker's endpoints for operators: list, clear and pin sequences."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from inference.worker.api.body_intake import Intake
from inference.worker.api.kv_api import KvApi
from inference.worker.api.worker_app import App
from inference.worker.kv.sequence_control import SequenceRow
from inference.worker.prompt.prompts import Prompts
from inference.worker.worker_errors import UnloadedError, WorkerError
from inference.worker.worker_requests import Facts
from tests.rigs.asgi import ask

T = TypeVar("T")
ROWS = (
    SequenceRow("aa", ("hot",), 100, 0, "one", 0.5),
    SequenceRow("bb", ("ram", "disk"), 4096, 2**20, "two", 7.25, 3, 1_800_000_000.0),
    SequenceRow("cc", ("disk",), 5, 20, "two", 900.0),
)


class FakeControl:
    """Three sequences; `ending`: the engine ends."""

    def __init__(self) -> None:
        self.rows = list(ROWS)
        self.pins: dict[str, float] = {}
        self.ending = False

    def kv_sequences(self) -> Future[Sequence[SequenceRow]]:
        return self._done(tuple(self.rows))

    def clear_kv(self, tenant: str | None) -> Future[int]:
        before = len(self.rows)
        self.rows = [row for row in self.rows if tenant not in (None, row.tenant)]
        return self._done(before - len(self.rows))

    def pin_kv(self, ids: Collection[str], seconds: float) -> Future[int]:
        found = {row.id for row in self.rows} & set(ids)
        self.pins |= dict.fromkeys(found, seconds)
        return self._done(len(found))

    def _done(self, result: T) -> Future[T]:
        future: Future[T] = Future()
        if self.ending:
            future.set_exception(UnloadedError())
        else:
            future.set_result(result)
        return future


def app_with(control: FakeControl | None, executor: ThreadPoolExecutor) -> App:
    tokenizer: Any = SimpleNamespace(longest_piece=None)
    facts = Facts("tiny", 100, 257, 8, ("completions",))
    return App(facts, Prompts(tokenizer, None, facts), lambda _tokens: "", None, None, executor, control=control)


@pytest.fixture
async def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
async def app(control: FakeControl) -> AsyncIterator[App]:
    with ThreadPoolExecutor(1) as executor:
        yield app_with(control, executor)


async def test_sequences_are_listed_without_their_text(app: App) -> None:
    answer = await ask(app, "GET", "/kv/sequences")
    expected = [asdict(row) | {"tiers": list(row.tiers)} for row in ROWS]
    assert (answer.status, answer.body) == (200, {"sequences": expected})


async def test_sequences_of_a_tenant_or_all_are_cleared(app: App, control: FakeControl) -> None:
    assert (await ask(app, "POST", "/kv/clear", {"tenant": "two"})).body == {"cleared": 2}
    assert [row.id for row in control.rows] == ["aa"]
    assert (await ask(app, "POST", "/kv/clear", {"tenant": None})).body == {"cleared": 1}


async def test_sequences_are_pinned_by_id_and_by_tenant(app: App, control: FakeControl) -> None:
    pin = {"ids": ["aa", "unknown"], "tenant": "two", "seconds": 60}
    assert (await ask(app, "POST", "/kv/pin", pin)).body == {"pinned": 3}
    assert control.pins == {"aa": 60.0, "bb": 60.0, "cc": 60.0}
    assert (await ask(app, "POST", "/kv/pin", {"ids": ["aa"], "seconds": 0})).body == {"pinned": 1}
    assert control.pins["aa"] == 0
    assert (await ask(app, "POST", "/kv/pin", {"tenant": "other", "seconds": 1})).body == {"pinned": 0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/kv/pin", {}),
        ("/kv/pin", {"ids": "aa", "seconds": 1}),
        ("/kv/pin", {"ids": ["aa"], "seconds": -1}),
        ("/kv/clear", {"tenants": ["one"]}),
        ("/kv/clear", []),
    ],
)
async def test_other_bodies_are_refused(app: App, control: FakeControl, path: str, body: Any) -> None:
    answer = await ask(app, "POST", path, body)
    assert (answer.status, answer.body["error"]["code"]) == (400, "invalid_request")
    assert (len(control.rows), control.pins) == (3, {})


async def test_requests_end_with_the_engine(app: App, control: FakeControl) -> None:
    control.ending = True
    answer = await ask(app, "GET", "/kv/sequences")
    assert (answer.status, answer.body["error"]["code"]) == (503, "model_loading")


async def test_engine_that_does_not_answer_is_not_waited_for() -> None:
    class Busy(FakeControl):
        def kv_sequences(self) -> Future[Sequence[SequenceRow]]:
            return Future()

    exchange: Any = None  # not used before the engine answers
    with ThreadPoolExecutor(1) as executor, pytest.raises(WorkerError, match="takes longer") as caught:
        await KvApi(Busy(), Intake(executor), 0.05).show(exchange)
    assert caught.value.status == 504


async def test_model_without_sequences_lists_none() -> None:
    """Embeddings leave nothing to continue."""
    with ThreadPoolExecutor(1) as executor:
        app = app_with(None, executor)
        assert (await ask(app, "GET", "/kv/sequences")).body == {"sequences": []}
        assert (await ask(app, "POST", "/kv/clear", {})).body == {"cleared": 0}
        assert (await ask(app, "POST", "/kv/pin", {"tenant": "one", "seconds": 5})).body == {"pinned": 0}
