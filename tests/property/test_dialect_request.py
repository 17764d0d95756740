"""A checked OpenAI request becomes a request that its cloud API accepts, or an error that names the parameter."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import orjson
import pytest
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.apis.openai.frames import Endpoint, Flavor
from gateway.apis.openai.generation_request import parse
from gateway.errors import UpstreamError
from tests.rigs.fake_provider import rules
from tests.rigs.fake_provider.strict import request_of
from tests.rigs.typed_bodies import needs_sampling_version, to_anthropic, to_openai, unsupported_by_openai
from tests.rigs.typed_bodies import unsupported_by_anthropic as unsupported_params

pytestmark = pytest.mark.unmeasured

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
IDS = st.text(st.sampled_from("abc:._-1"), min_size=1, max_size=6)
NAMES = st.sampled_from(["level", "time", "weather-2"])
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(b"x").decode()}}
TEXT_PART = st.builds(lambda text: {"type": "text", "text": text}, WORDS)
CONTENT = WORDS | st.lists(TEXT_PART | st.just(IMAGE), min_size=1, max_size=3)
TEXT_CONTENT = WORDS | st.lists(TEXT_PART, min_size=1, max_size=3)


@st.composite
def exchanges(draw: st.DrawFn) -> list[dict[str, Any]]:
    """One or more messages that belong together: a call is followed by all its results."""
    kind = draw(st.sampled_from(["system", "developer", "user", "assistant", "calls"]))
    if kind != "calls":
        return [{"role": kind, "content": draw(CONTENT if kind == "user" else TEXT_CONTENT)}]
    ids = draw(st.lists(IDS, min_size=1, max_size=3, unique=True))
    arguments = draw(st.sampled_from(["", "{}", '{"a": [1]}', "[1]", "{broken", '"x"']))
    calls = [{"id": id, "type": "function", "function": {"name": draw(NAMES), "arguments": arguments}} for id in ids]
    results = [{"role": "tool", "tool_call_id": id, "content": draw(TEXT_CONTENT)} for id in draw(st.permutations(ids))]
    return [{"role": "assistant", "content": draw(st.none() | WORDS), "tool_calls": calls}, *results]


TOOLS = st.lists(NAMES, min_size=1, max_size=3, unique=True).map(
    lambda names: [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]
)
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2) | st.integers(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 100),
    "min_p": st.floats(0, 1),
    "max_tokens": st.integers(1, 16_000),
    "max_completion_tokens": st.integers(1, 16_000),
    "n": st.integers(1, 3),
    "seed": st.integers(-5, 5),
    "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "user": WORDS,
    "frequency_penalty": st.sampled_from([0, 0.0, 1.5]),
    "logprobs": st.booleans(),
    "reasoning_effort": st.sampled_from(["none", "minimal", "low", "medium", "high", "xhigh", "max", "odd"]),
    "response_format": st.sampled_from(
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}}},
        ]
    ),
    "parallel_tool_calls": st.booleans(),
    "store": st.booleans(),
    "metadata": st.just({"a": "b"}),
}


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    messages = [message for part in draw(st.lists(exchanges(), min_size=1, max_size=5)) for message in part]
    body = {"model": "m", "messages": messages}
    body |= {
        name: draw(st.none() | OPTIONS[name]) for name in draw(st.lists(st.sampled_from(list(OPTIONS)), unique=True))
    }
    if draw(st.booleans()):
        body["tools"] = draw(TOOLS)
        names = [tool["function"]["name"] for tool in body["tools"]]
        body["tool_choice"] = draw(
            st.sampled_from([None, "auto", "none", "required", {"type": "function", "function": {"name": names[0]}}])
        )
    return body


MODELS = st.sampled_from(["claude-opus-5", "claude-sonnet-4-6", "claude-haiku-4-5", "claude-3-haiku-20240307"])


@settings(max_examples=300, deadline=None)
@given(bodies(), MODELS)
def test_request_is_valid_for_anthropic_or_the_error_names_a_parameter(body: dict[str, Any], model: str) -> None:
    parse(Endpoint.CHAT, orjson.dumps(body))  # only requests that the gateway accepts
    before = copy.deepcopy(body)
    refused = unsupported_params(body, model)
    try:
        request = to_anthropic(body, model)
    except UpstreamError as error:
        assert error.code == "unsupported_parameter"
        assert error.param in refused
        return
    finally:
        assert body == before
    assert not refused
    rules.anthropic(request, "2023-06-01" if needs_sampling_version(request) else "2026-10-21")
    request_of(MessageCreateParamsStreaming, request)
    assert json.loads(json.dumps(request)) == request
    assert to_anthropic(body, model) == request


def _texts(content: Any) -> list[str]:
    parts = [content] if isinstance(content, str) else [part.get("text") for part in content or ()]
    return [text for text in parts if text and text.strip()]


@settings(max_examples=200, deadline=None)
@given(st.lists(exchanges(), min_size=1, max_size=6))
def test_translated_messages_keep_every_text_in_order(parts: list[list[dict[str, Any]]]) -> None:
    messages = [message for part in parts for message in part]
    body = {"messages": messages}
    if unsupported_params(body):
        return
    request = to_anthropic(body, "claude-haiku-4-5")

    def texts_of(role: str) -> list[str]:
        blocks = [block for turn in request["messages"] if turn["role"] == role for block in turn["content"]]
        return [block["text"] for block in blocks if block["type"] == "text"]

    system = [text for m in messages if m["role"] in ("system", "developer") for text in _texts(m["content"])]
    users = [text for m in messages if m["role"] == "user" for text in _texts(m["content"])]
    assistants = [text for m in messages if m["role"] == "assistant" for text in _texts(m["content"])]
    if "system" in request:
        assert request["system"] == "\n\n".join(system)
    assert [text.rstrip() for text in texts_of("assistant")] == [text.rstrip() for text in assistants]
    opening = 1 if len(texts_of("user")) > len(users) else 0
    assert texts_of("user")[opening:] == users
    results = [b for turn in request["messages"] for b in turn["content"] if b["type"] == "tool_result"]
    assert len(results) == sum(m["role"] == "tool" for m in messages)


OPENAI = ("gpt-4.1", "gpt-5-mini", "gpt-5.2", "o1", "o4-mini")


@settings(max_examples=200, deadline=None)
@given(bodies(), st.sampled_from([*((flavor, "m") for flavor in Flavor), *((Flavor.OPENAI, m) for m in OPENAI)]))
def test_request_is_valid_for_openai_and_google_or_the_error_names_a_parameter(
    body: dict[str, Any], address: tuple[Flavor, str]
) -> None:
    flavor, model = address
    before = copy.deepcopy(body)
    refused = unsupported_by_openai(body, flavor, Endpoint.CHAT, model)
    try:
        request = to_openai(Endpoint.CHAT, body, model, flavor)
    except UpstreamError as error:
        assert error.param in refused
        return
    assert not refused
    assert body == before
    if request.get("reasoning_effort") == "odd":
        del request["reasoning_effort"]  # the provider checks unknown values
    rules.openai_chat(request, flavor)
