"""Defects are logged and do not spread: background tasks, closing of streams, permits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.apis.openai.frames import Data, DeltaKind, Endpoint, Frame
from gateway.providers.local.inference_snapshot import InferenceView
from gateway.providers.provider import Call
from gateway.routing.budget import Budget, Limits
from gateway.routing.stream_reader import StreamReader
from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import Gateway
from tests.rigs.stack import until
from tests.rigs.typed_bodies import call as typed_call

pytestmark = pytest.mark.timeout(60)

CALL = typed_call(Endpoint.CHAT, "m", {}, "id")


class FailsOnClose:
    """A provider whose streams raise when they are closed."""

    name = "broken"
    is_local = False

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[AsyncIterator[Frame]]:
        async def frames() -> AsyncIterator[Frame]:
            yield Data(b"{}", DeltaKind.CONTENT)

        yield frames()
        raise RuntimeError("cannot close")


async def test_error_on_close_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    budget = Budget(Limits(30, 15, 300, 120, 2), asyncio.get_running_loop().time())
    reader = StreamReader(FailsOnClose(), CALL, budget, last=True)  # type: ignore[arg-type]
    await reader.open()
    assert isinstance(await reader.next(), Data)
    await reader.close()
    assert "the connection to broken did not close properly" in caplog.text
    assert "cannot close" in caplog.text


async def test_unexpected_answer_to_a_poll_is_logged_and_the_poll_repeated(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Any] = [RuntimeError("a defect"), {"data": 7}, {"data": []}]

    async def fetch(path: str, seconds: float) -> Any:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    view = InferenceView(fetch)
    polling = asyncio.create_task(view.run())
    try:
        await until("the service was seen", lambda: view.reachable)
    finally:
        polling.cancel()
    assert "RuntimeError: a defect" in caplog.text
    assert "Traceback" in caplog.text


async def test_failed_background_task_is_logged_with_its_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url) as gateway:

        async def dying() -> None:
            raise RuntimeError("gone")

        with caplog.at_level(logging.ERROR, "gateway.runtime"):
            gateway.runtime.spawn(dying(), "dying")
            await until("it was logged", lambda: "the background task dying failed" in caplog.text)
        assert "RuntimeError: gone" in caplog.text


async def test_permits_are_released_when_an_attempt_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url) as gateway:
        with monkeypatch.context() as patch:
            patch.setattr("gateway.routing.chain_runner.Attempt", None)
            assert (await gateway.chat()).status_code == 500
        breakers = gateway.runtime.breakers
        assert breakers.breaker("local").outstanding == breakers.breaker("local", "demo").outstanding == 0
        assert (await gateway.chat()).status_code == 200
        assert breakers.breaker("local").outstanding == breakers.breaker("local", "demo").outstanding == 0
