"""Usage in streams: only if requested, and of the prompt in Anthropic's `message_start`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from gateway.apis.openai.frames import Data, DeltaKind
from gateway.apis.openai.openai_api import OpenAIWriter
from inference.worker.answers.generation import Output
from inference.worker.api.response_writer import Stream
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.fake_provider import FakeProvider
from tests.rigs.gateway_rig import KEY, MESSAGES, Gateway

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url) as gateway:
        yield gateway


def chunks(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


# --- the worker -------------------------------------------------------------------------------------------------------
def streamed(kind: Any, **options: Any) -> list[dict[str, Any]]:
    stream = Stream(kind, "tiny", 1, with_usage=True, **options)
    first = stream.frames(Output(0, "Hi", 1, 7, (), None))
    return chunks((first + stream.frames(Output(0, "", 1, 7, (), "stop"))).decode())


def test_first_chunk_of_a_chat_carries_the_usage_of_the_prompt() -> None:
    first, *others = streamed("chat", prompt_tokens=12, choices=2)
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert first["usage"] == {
        "prompt_tokens": 12,
        "completion_tokens": 0,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 7},
    }
    assert others and all("usage" not in chunk for chunk in others)


def test_chunks_of_a_completion_have_no_prompt_usage() -> None:
    assert all("usage" not in chunk for chunk in streamed("completion", prompt_tokens=12))


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_requested_usage_is_null_in_every_other_chunk_as_in_openai(kind: str) -> None:
    assert all(chunk["usage"] is None for chunk in streamed(kind))


# --- the gateway ------------------------------------------------------------------------------------------------------
async def test_message_start_counts_the_prompt_of_a_local_model(gateway: Gateway, fake: FakeInference) -> None:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=KEY, max_retries=0) as client:
        events = [event async for event in await client.messages.create(
            model="demo", max_tokens=5, messages=[{"role": "user", "content": "Hi"}], stream=True
        )]  # fmt: skip
    start, delta = events[0], events[-2]
    assert start.type == "message_start" and delta.type == "message_delta"
    assert (start.message.usage.input_tokens, start.message.usage.output_tokens) == (3, 0)
    assert (delta.usage.input_tokens, delta.usage.output_tokens) == (3, 3)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_chunks_have_usage_only_if_requested(gateway: Gateway, fake: FakeInference, path: str) -> None:
    body = {
        "model": "demo",
        "stream": True,
        **({"prompt": "Hi"} if path == "/v1/completions" else {"messages": MESSAGES}),
    }
    plain = await gateway.client.post(path, json=body)
    assert '"usage"' not in plain.text
    assert fake.seen[-1].body["stream_options"] == {"include_usage": True, "prompt_usage": True}
    sent = chunks((await gateway.client.post(path, json={**body, "stream_options": {"include_usage": True}})).text)
    assert fake.seen[-1].body["stream_options"] == {"include_usage": True}
    assert [chunk["usage"]["prompt_tokens"] for chunk in sent if chunk.get("usage")] == [3]
    assert sent[-1]["choices"] == []


async def test_clients_cannot_request_prompt_usage(gateway: Gateway, fake: FakeInference) -> None:
    body = {"model": "demo", "messages": MESSAGES, "stream": True, "stream_options": {"prompt_usage": True}}
    answer = await gateway.client.post("/v1/chat/completions", json=body)
    assert '"usage"' not in answer.text


async def test_chunks_of_a_cloud_have_usage_only_if_requested(tmp_path: Path, fake: FakeInference) -> None:
    async with FakeProvider() as cloud:
        config = f"""
providers: {{cloud: {{kind: openai, api_key: fake-cloud-key, base_url: {cloud.openai_url}}}}}
routes: {{gpt: {{chain: [cloud/gpt]}}}}
"""
        async with Gateway(tmp_path, fake.url, config) as gateway:
            answer = await gateway.chat(model="gpt", stream=True)
    assert answer.status_code == 200
    assert len(chunks(answer.text)) > 2
    assert '"usage"' not in answer.text


async def test_resumed_answer_counts_its_prompt_once(gateway: Gateway, fake: FakeInference) -> None:
    """The resumed part has no prompt usage of its own."""
    fake.answers["demo"] = Answer(words=("one ", "two "), cut=True)
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=KEY, max_retries=0) as client:
        events = [event async for event in await client.messages.create(
            model="demo", max_tokens=50, messages=[{"role": "user", "content": "Hi"}], stream=True
        )]  # fmt: skip
    assert [event.type for event in events].count("message_start") == 1
    resumed = [seen.body for seen in fake.seen if "answer_so_far" in seen.body]
    assert resumed and all("prompt_usage" not in body["stream_options"] for body in resumed)


# --- the writer -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("payload", "written"),
    [
        (b'{"choices":[{"delta":{"content":"a"}}],"usage":null,"obfuscation":"x"}',
         b'{"choices":[{"delta":{"content":"a"}}],"obfuscation":"x"}'),
        (b'{"usage": null, "choices": [{"delta": {}}]}', b'{"choices":[{"delta":{}}]}'),
        (b'{"choices": [{"delta": {"content": "\\"usage\\":null"}}]}',
         b'{"choices": [{"delta": {"content": "\\"usage\\":null"}}]}'),
        (b'{"choices":[{"delta":{"content":"usage"}}]}', b'{"choices":[{"delta":{"content":"usage"}}]}'),
        (b'{"choices":[{"usage":"a}]}', b'{"choices":[{"usage":"a}]}'),
    ],
)  # fmt: skip
def test_writer_removes_only_usage(payload: bytes, written: bytes) -> None:
    frames = [Data(payload, DeltaKind.CONTENT)]
    assert OpenAIWriter(include_usage=False).write(frames) == b"data: " + written + b"\n\n"
    assert OpenAIWriter(include_usage=True).write(frames) == b"data: " + payload + b"\n\n"
