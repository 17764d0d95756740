"""Ollama's client against a simulated local tier and a simulated cloud: tool calls, embeddings, broken streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import ollama
import pytest
import pytest_asyncio

from tests.rigs.fake_inference import Answer
from tests.rigs.gateway_rig import KEY
from tests.rigs.openai_tiers import Tiers, tiers

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]

MESSAGES: Any = [{"role": "user", "content": "Hello!"}]
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
USAGE = {"prompt_tokens": 20, "completion_tokens": 9}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Tiers]:
    async with tiers(tmp_path_factory.mktemp("ollama")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(running: Tiers) -> AsyncIterator[ollama.AsyncClient]:
    headers = {"authorization": f"Bearer {KEY}"}
    async with ollama.AsyncClient(host=running.gateway.url, headers=headers) as client:
        yield client


def calling() -> Answer:
    """A local answer with reasoning and a tool call."""
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"reasoning_content": "Hm."}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [CALL]}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": USAGE},
    ]
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "demo"}
    frames = [b"data: " + json.dumps({**head, **chunk}).encode() + b"\n\n" for chunk in chunks]
    return Answer(raw=b"".join([*frames, b"data: [DONE]\n\n"]))


async def test_tool_calls_are_equal_whole_and_streamed(running: Tiers, client: ollama.AsyncClient) -> None:
    running.local.answers["demo"] = calling()
    whole = await client.chat("demo", MESSAGES, think=True)
    streamed = [part async for part in await client.chat("demo", MESSAGES, think=True, stream=True)]
    running.forget()
    for messages in ([whole.message], [part.message for part in streamed]):
        calls = [call.function for message in messages for call in message.tool_calls or ()]
        assert [(call.name, call.arguments) for call in calls] == [("look", {"at": "it"})]
        assert "".join(message.thinking or "" for message in messages) == "Hm."
    assert (whole.done_reason, whole.eval_count) == ("stop", 9) == (streamed[-1].done_reason, streamed[-1].eval_count)


async def test_clouds_get_the_tools_of_a_request(running: Tiers, client: ollama.AsyncClient) -> None:
    for model in ("gpt", "claude"):
        answer = await client.chat(model, MESSAGES, tools=[LOOK], options={"num_predict": 50, "top_k": 5})
        assert answer.message.content or answer.message.tool_calls
        assert "look" in json.dumps(running.cloud.records[-1].body["tools"])


async def test_embed_and_the_older_embeddings_return_vectors(client: ollama.AsyncClient) -> None:
    assert (await client.embed("demo:latest", "a")).embeddings == [[0.5, 0.25]]
    found = await client.embed("vectors", ["a", "b"])
    assert [type(number) for vector in found.embeddings for number in vector[:1]] == [float, float]
    assert (await client.embeddings("demo", "a")).embedding == [0.5, 0.25]


async def test_broken_stream_ends_in_an_error(client: ollama.AsyncClient) -> None:
    parts = await client.chat("cut", MESSAGES, stream=True)
    with pytest.raises(ollama.ResponseError, match="interrupted"):
        _ = [part async for part in parts]


async def test_openapi_document_has_the_paths_of_ollama(running: Tiers) -> None:
    paths = (await running.gateway.client.get("/openapi.json")).json()["paths"]
    assert {"/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show", "/api/tags"} <= paths.keys()
    assert "application/x-ndjson" in paths["/api/chat"]["post"]["responses"]["200"]["content"]
