"""Answers that end without all of their choices, frames or fields."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.apis.openai.assemble import Assembly
from inference.worker.answers.generation import Output, TokenLogprob
from inference.worker.api import response_writer
from inference.worker.api.response_writer import Answer as WorkerAnswer
from inference.worker.api.response_writer import Stream, Usage
from inference.worker.dialects.answer_parts import Content
from tests.rigs.canned_http import Canned, canned_service
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import MESSAGES, Gateway

pytestmark = pytest.mark.timeout(60)

CLOUD = """
providers:
  openai: {{kind: openai, api_key: "${{env:CLOUD}}", base_url: {url}/v1}}
routes:
  demo: {{chain: [openai/gpt, local/demo]}}
"""


def frame(index: int, finish: str | None = None, **fields: Any) -> bytes:
    chunk = {"id": "c", "created": 1, "model": "demo", "choices": [{"index": index, **fields, "finish_reason": finish}]}
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


HALF_A_CHAT = Answer(
    raw=frame(0, delta={"content": "done"}) + frame(1, delta={"content": "half of"}) + frame(0, "stop", delta={})
)
HALF_A_TEXT = Answer(raw=frame(0, text="done") + frame(1, text="half of") + frame(0, "stop", text=""))


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url) as gateway:
        yield gateway


@pytest.mark.parametrize("end", [b"", b"data: [DONE]\n\n"])
async def test_stream_with_an_incomplete_choice_ends_in_an_error_frame(
    gateway: Gateway, fake: FakeInference, end: bytes
) -> None:
    assert HALF_A_CHAT.raw is not None
    fake.answers["demo"] = Answer(raw=HALF_A_CHAT.raw + end)
    got = await gateway.chat(stream=True, n=2)
    assert "[DONE]" not in got.text
    assert json.loads(got.text.split("data: ")[-1])["error"]["code"] == "model_failed"


async def test_answer_with_an_incomplete_choice_is_answered_by_the_next_tier(
    gateway: Gateway, fake: FakeInference
) -> None:
    fake.answers["demo"] = HALF_A_CHAT
    got = await gateway.chat(n=2)
    assert got.headers["x-headgate-model"] == "local/demo-mini"
    assert [choice["finish_reason"] for choice in got.json()["choices"]] == ["stop", "stop"]


async def test_completion_with_an_incomplete_prompt_is_answered_by_the_next_tier(
    gateway: Gateway, fake: FakeInference
) -> None:
    fake.answers["demo"] = HALF_A_TEXT
    body = {"model": "demo", "prompt": ["a", "b"]}
    got = await gateway.client.post("/v1/completions", json=body)
    assert got.headers["x-headgate-model"] == "local/demo-mini"
    assert [choice["index"] for choice in got.json()["choices"]] == [0, 1]


async def test_cloud_that_answers_one_of_two_prompts_is_replaced_by_the_next_tier(
    tmp_path: Path, fake: FakeInference
) -> None:
    """The body ends without an error after the first choice, but without `[DONE]`."""
    half = Canned(headers={"content-type": "text/event-stream"}, frames=[frame(0, "stop", text="done")])
    with canned_service({"POST /v1/completions": half}) as cloud:
        async with Gateway(tmp_path, fake.url, CLOUD.format(url=cloud.url), {"CLOUD": "k"}) as gateway:
            got = await gateway.client.post("/v1/completions", json={"model": "demo", "prompt": ["a", "b"]})
    assert got.headers["x-headgate-model"] == "local/demo"
    assert [choice["finish_reason"] for choice in got.json()["choices"]] == ["stop", "stop"]


@pytest.mark.parametrize(
    ("path", "ending"), [("/v1/messages", "event: error\n"), ("/v1/responses", "event: response.failed\n")]
)
async def test_unreadable_chunk_ends_the_stream_with_an_error_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str, ending: str
) -> None:
    body = {"model": "demo", "stream": True, "max_tokens": 9, "messages": MESSAGES}
    if path == "/v1/responses":
        body = {"model": "demo", "stream": True, "input": "Hello!"}
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url) as gateway:
        fake.answers["demo"] = Answer(garbage=b'data: {"choices":[{"delta":{"content":"a}]}\n\n')
        answer = await gateway.client.post(path, json=body)
    assert answer.status_code == 200
    assert ending in answer.text and "internal error of the gateway" in answer.text
    assert "internal error of the gateway" in caplog.text


SCORED = TokenLogprob(b"b", -0.5, ((b"b", -0.5), (b"\xc3", -1.0)), 0)
OUTPUTS = [
    Output(0, "", 1, logprobs=(SCORED,), parts=(Content("a"),)),
    Output(0, "", 2, logprobs=(SCORED, SCORED), parts=(Content("b"),)),
    Output(0, "", 2, finish="stop"),
]


def test_streamed_chunks_add_up_to_the_whole_answer() -> None:
    stream, answer, assembly = (
        Stream("chat", "tiny", 5, with_usage=False, has_parts=True),
        WorkerAnswer("chat"),
        Assembly(),
    )
    for output in OUTPUTS:
        answer.add(output)
        for frame in stream.frames(output).split(b"\n\n")[:-1]:
            assembly.add(json.loads(frame.removeprefix(b"data: ")))
    whole = json.loads(response_writer.whole("chat", "tiny", 5, [answer], Usage(1, 2, 0, 0), with_logprobs=True))
    assert assembly.result()["choices"] == whole["choices"]
    assert whole["choices"][0]["logprobs"]["refusal"] is None
