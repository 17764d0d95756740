"""Answers with tools, formats, scores or several choices that break off."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.routing import attempt
from inference.protocol import Code
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import Gateway

pytestmark = pytest.mark.timeout(60)

ALONE = """
routes:
  demo: {chain: [local/demo]}
  never: {chain: [local/demo], resume: off}
breaker: {failures: 1000, min_requests: 1000}
"""
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": TOOLS},
    "format": {"response_format": {"type": "json_object"}},
    "scores": {"logprobs": True},
    "choices": {"n": 2},
}


def frame(index: int, finish: str | None = None, **delta: Any) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "demo", "choices": [choice]}
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


FINISH = frame(0, "stop") + frame(1, "stop")
DIED = b'data: {"error":{"message":"the worker died","type":"server_error","code":"model_failed","param":null}}\n\n'
ROLES = frame(0, role="assistant", content="") + frame(1, role="assistant", content="")


@pytest.fixture
async def fake() -> AsyncIterator[FakeInference]:
    async with FakeInference("token") as fake:
        fake.models["demo"] = replace(fake.models["demo"], capabilities=("chat", "completions", "tools"))
        yield fake


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url, ALONE) as gateway:
        await gateway.look()
        yield gateway


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("end", [{"cut": True}, {"error": Code.MODEL_FAILED}], ids=["cut", "error"])
async def test_answer_cut_after_its_finish_reason_is_complete(
    gateway: Gateway, fake: FakeInference, shape: str, end: dict[str, Any]
) -> None:
    fake.answers["demo"] = Answer(words=("Hi",), garbage=FINISH, **end)
    streamed = await gateway.chat(stream=True, **SHAPES[shape])
    assert streamed.text.endswith("data: [DONE]\n\n")
    whole = await gateway.chat(**SHAPES[shape])
    assert whole.status_code == 200
    assert {choice["finish_reason"] for choice in whole.json()["choices"]} == {"stop"}
    assert len(fake.seen) == 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("route", ["demo", "never"])
async def test_answer_cut_before_its_first_content_is_repeated(
    gateway: Gateway, fake: FakeInference, monkeypatch: pytest.MonkeyPatch, route: str, shape: str
) -> None:
    """The repeated answer keeps the id that was already sent, and sends each role once."""
    monkeypatch.setattr(attempt, "COMMENT_GRACE_SECONDS", 0.0)
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    content = {"tool_calls": [call]} if shape == "tools" else {"content": "Hi"}
    again = (ROLES + frame(0, **content) + frame(1, **content)).replace(b'"id":"c"', b'"id":"d"') + FINISH
    fake.queue["demo"] = [Answer(comments=1, raw=ROLES + DIED), Answer(raw=again + b"data: [DONE]\n\n")]
    got = await gateway.chat(route, stream=True, **SHAPES[shape])
    assert got.text.endswith("data: [DONE]\n\n")
    chunks = [json.loads(line[6:]) for line in got.text.splitlines() if line.startswith("data: {")]
    assert {chunk["id"] for chunk in chunks} == {"c"}
    deltas = [(choice["index"], choice["delta"]) for chunk in chunks for choice in chunk["choices"]]
    assert [index for index, delta in deltas if "role" in delta] == [0, 1]
    for index in range(SHAPES[shape].get("n", 1)):
        assert content in [delta for at, delta in deltas if at == index]
    assert len(fake.seen) == 2
