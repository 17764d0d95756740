"""A whole answer is sent at the right time and counts its attempts."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway.endpoints import serve
from gateway.routing.attempt import Attempt
from gateway.routing.resume_runner import Answer
from tests.rigs.fake_inference import Answer as FakeAnswer
from tests.rigs.fake_inference import FakeInference, _chunk
from tests.rigs.gateway_rig import Gateway

KEY = "key-of-a-team"
WHOLE = _chunk("demo", True, text="Hi") + _chunk("demo", True, finish="stop")


@pytest.fixture
async def slow_to_end() -> AsyncIterator[str]:
    """The address of a cloud whose bodies end 30 ms after `[DONE]`."""

    async def chat(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        choice = {"index": 0, "delta": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
        chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "gpt", "choices": [choice]}
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")
        await asyncio.sleep(0.03)
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


def cloud(address: str, more: str) -> str:
    return f"""
providers:
  openai: {{kind: openai, api_key: k, base_url: "{address}"}}
routes:
  demo: {{chain: [openai/gpt]}}
{more}
"""


@pytest.mark.parametrize(
    "bound",
    [
        "admission: {max_in_flight: 1, queue: 0}\nkeys: [{name: team, hash: 'sha256:HASH'}]",
        "keys: [{name: team, hash: 'sha256:HASH', limits: {concurrent: 1}}]",
    ],
)
async def test_answered_request_has_released_its_slot_and_limit(tmp_path: Path, slow_to_end: str, bound: str) -> None:
    config = cloud(slow_to_end, bound.replace("HASH", hashlib.sha256(KEY.encode()).hexdigest()))
    async with Gateway(tmp_path, "http://127.0.0.1:9", config) as gateway:
        for _ in range(5):
            answer = await gateway.chat(headers={"authorization": f"Bearer {KEY}"})
            assert answer.status_code == 200, answer.text
            record = await gateway.admin("GET", f"/admin/requests/{answer.headers['x-request-id']}")
            assert record.json()["outcome"] == "success"


@pytest.mark.parametrize("rest", [b"", b"data: oops\n\n", b'data: {"error": {"message": "x", "code": "e"}}\n\n'])
async def test_answer_that_breaks_after_its_finish_reason_is_one_attempt(
    tmp_path: Path, fake: FakeInference, rest: bytes
) -> None:
    fake.answers["demo"] = FakeAnswer(raw=WHOLE + rest)
    async with Gateway(tmp_path, fake.url) as gateway:
        answer = await gateway.chat()
    assert (answer.status_code, answer.headers["x-headgate-attempts"]) == (200, "1")


async def test_local_answer_is_sent_before_it_is_concluded(
    tmp_path: Path, fake: FakeInference, slow_to_end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing a local stream does not wait. The answer of a cloud is sent after its stream is closed."""
    seen: list[str] = []
    send_at_once, conclude = serve.send_at_once, Answer.conclude

    def sending(*args: Any) -> bool:
        seen.append("sent")
        return send_at_once(*args)

    async def concluding(answer: Answer) -> None:
        seen.append("concluded")
        await conclude(answer)

    monkeypatch.setattr(serve, "send_at_once", sending)
    monkeypatch.setattr(Answer, "conclude", concluding)
    for name in ("local", "cloud"):
        (tmp_path / name).mkdir()
    async with Gateway(tmp_path / "local", fake.url) as gateway:
        assert (await gateway.chat()).status_code == 200
    async with Gateway(tmp_path / "cloud", "http://127.0.0.1:9", cloud(slow_to_end, "")) as gateway:
        assert (await gateway.chat()).status_code == 200
    assert seen == ["sent", "concluded", "concluded", "sent"]


async def test_attempt_is_closed_when_its_outcome_cannot_be_recorded(
    tmp_path: Path, fake: FakeInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Attempt] = []
    close = Attempt.close

    async def closing(attempt: Attempt) -> None:
        closed.append(attempt)
        await close(attempt)

    def fail(_attempt: Attempt) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Attempt, "close", closing)
    monkeypatch.setattr(Attempt, "succeed", fail)
    async with Gateway(tmp_path, fake.url) as gateway:
        await gateway.chat()
        assert len(closed) == 1
        assert gateway.runtime.admission.in_flight == 0
