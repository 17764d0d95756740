"""While a step took longer than the time between two progress comments, every second one was left out."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inference.worker.api.worker_app import App
from inference.worker.backend import BatchRow, Decode
from inference.worker.engine.engine import Engine
from inference.worker.engine.output_tickets import OutputDispatcher
from inference.worker.engine_stats import HUNG_STEP_SECONDS, EngineCounters
from inference.worker.prompt.prompts import Prompts
from inference.worker.steps import Limits
from inference.worker.worker_errors import UnloadedError
from inference.worker.worker_requests import Facts
from tests.regressions.test_worker_echo_on_the_event_loop import Bytes
from tests.rigs.fake_backend import ByteVocabulary, FakeBackend, SamplerShop

FACTS = Facts("tiny", 100, 257, 8, ("completions",))


class SlowBackend(FakeBackend):
    """Its steps take until `enough`."""

    def __post_init__(self) -> None:
        """Begins slow."""
        super().__post_init__()
        self.enough = threading.Event()

    def decode(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
        """See the fake."""
        assert self.enough.wait(20)
        return super().decode(rows)


async def test_comments_go_on_during_one_step() -> None:
    backend = SlowBackend()
    engine = Engine(
        backend,
        ByteVocabulary(),
        SamplerShop(b"abc"),
        Limits(slots=4, context=100, batch=32, queue=4),
        OutputDispatcher(asyncio.get_running_loop()).deliver,
        lambda _message: None,
    )
    engine.start()
    raw = json.dumps({"prompt": [104, 105], "max_tokens": 1, "stream": True}).encode()
    said: list[bytes] = []
    unread = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return unread.pop() if unread else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        if body := message.get("body"):
            said.append(body)
        if sum(body.startswith(b":") for body in said) == 2:
            backend.enough.set()

    with ThreadPoolExecutor(1) as executor:
        app = App(FACTS, Prompts(Bytes(), None, FACTS), lambda _tokens: "", engine, None, executor)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        try:
            async with asyncio.timeout(8):
                await app(scope, receive, send)
        finally:
            backend.enough.set()
    assert engine.stop(UnloadedError())
    assert said[-1].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("seconds", "is_computing"), [(0.0, True), (HUNG_STEP_SECONDS, False)])
def test_a_step_without_an_end_explains_nothing(seconds: float, is_computing: bool) -> None:
    now = 5.0
    counters = EngineCounters(lambda: now)
    assert not counters.is_computing
    counters.begin(1)
    now += seconds
    assert counters.is_computing is is_computing
    counters.end()
    assert not counters.is_computing
