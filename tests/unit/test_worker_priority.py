"""Priorities in a worker: waiting requests of all kinds are served in their order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from inference.protocol import H_PRIORITY, Priority
from inference.worker.api.worker_app import App
from inference.worker.engine.embedder import Embedder, Vector
from inference.worker.engine.engine import Engine
from inference.worker.engine.engine_work import Work
from inference.worker.engine.output_tickets import OutputDispatcher, Ticket
from inference.worker.prompt.prompts import Prompts
from inference.worker.steps import Limits
from inference.worker.worker_errors import UnloadedError
from inference.worker.worker_requests import Facts
from tests.rigs.fake_backend import ByteVocabulary, FakeBackend, SamplerShop
from tests.unit.test_worker_embedder import FakePooling

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [104, 105], "max_tokens": 2},
    "/v1/embeddings": {"input": [[104, 105], [106]]},
}


class TellingEngine(Engine):
    """Sets `given` at each submitted request, and `work` to it."""

    given: asyncio.Event
    work: Work

    def submit(self, work: Work, ticket: Ticket[Any]) -> None:
        self.work = work
        super().submit(work, ticket)
        self.given.set()


class TellingEmbedder(Embedder):
    """Sets `given` at each submitted request."""

    given: asyncio.Event

    def submit(
        self,
        inputs: Sequence[Sequence[int]],
        ticket: Ticket[Vector],
        deadline: float | None = None,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        super().submit(inputs, ticket, deadline, priority)
        self.given.set()


def apps(executor: ThreadPoolExecutor, path: str) -> tuple[App, TellingEngine | TellingEmbedder]:
    """An app whose engine is not started and computes one request at a time."""
    deliver = OutputDispatcher(asyncio.get_running_loop()).deliver
    pools = path == "/v1/embeddings"
    facts = Facts("tiny", 100, 257, 8, ("embeddings",) if pools else ("completions",))
    engine: TellingEngine | None = None
    embedder: TellingEmbedder | None = None
    if pools:
        embedder = TellingEmbedder(FakePooling(n_slots=1), 8, deliver, print)
    else:
        limits = Limits(slots=1, context=100, batch=32, queue=8)
        engine = TellingEngine(FakeBackend(), ByteVocabulary(), SamplerShop(b"abc"), limits, deliver, print)
    tokenizer: Any = SimpleNamespace(longest_piece=None)  # token ids need no more
    app = App(facts, Prompts(tokenizer, None, facts), lambda _tokens: "", engine, embedder, executor)
    thread = engine or embedder
    assert thread is not None
    thread.given = asyncio.Event()
    return app, thread


async def status(app: App, path: str, priority: str) -> int:
    """The status of one request."""
    raw = json.dumps(BODIES[path]).encode()
    headers = [(b"content-length", str(len(raw)).encode()), (H_PRIORITY.encode(), priority.encode())]
    unread = [{"type": "http.request", "body": raw, "more_body": False}]
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return unread.pop() if unread else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    await app({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send)
    return statuses[0]


@pytest.mark.parametrize("path", BODIES)
async def test_high_priority_request_is_served_before_an_earlier_low_one(path: str) -> None:
    """A request without a priority is served between them."""
    ended: list[str] = []

    async def ask(priority: str) -> None:
        assert await status(app, path, priority) == 200
        ended.append(priority)

    with ThreadPoolExecutor(1) as executor:
        app, thread = apps(executor, path)
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            for priority in ("low", "", "high"):
                tasks.create_task(ask(priority))
                await thread.given.wait()
                thread.given.clear()
            thread.start()
    assert ended == ["high", "", "low"]
    assert thread.stop(UnloadedError())


@pytest.mark.parametrize("path", BODIES)
async def test_invalid_priority_is_rejected(path: str) -> None:
    with ThreadPoolExecutor(1) as executor:
        app, thread = apps(executor, path)
        async with asyncio.timeout(5):
            assert await status(app, path, "urgent") == 400
    assert not thread.given.is_set()


@pytest.mark.parametrize("path", BODIES)
async def test_worker_parses_priorities_as_the_inference_service_does(path: str) -> None:
    """In any case; the header is passed on unchanged."""
    with ThreadPoolExecutor(1) as executor:
        app, thread = apps(executor, path)
        thread.start()
        async with asyncio.timeout(5):
            assert await status(app, path, "High") == 200
    assert thread.stop(UnloadedError())
