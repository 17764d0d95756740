"""The fast path for ordinary requests gives the same result as the full one; a null makes a request not ordinary."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import parse
from gateway.errors import RequestError

SCALARS = st.sampled_from([None, True, 0, 1, -1, 0.5, 3, "", "x", [], {}, [1], ["x"], {"a": 1}])
PARTS = st.sampled_from(
    [
        {"type": "text", "text": "Hi"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        {"type": "nothing"},
        "text",
    ]
)
ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool", "function", "unknown", ["user"], None, 1])
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": ROLES,
        "content": st.just("Hi") | st.lists(PARTS, max_size=2) | SCALARS,
        "name": SCALARS,
        "tool_call_id": SCALARS,
    },
)
SPOKEN = st.fixed_dictionaries({"role": ROLES, "content": st.just("Hi") | st.lists(PARTS, min_size=1, max_size=2)})
MESSAGES = st.lists(st.just({"role": "user", "content": "Hi"}) | SPOKEN | MESSAGE | SCALARS, max_size=3) | SCALARS
REST = {
    name: st.just(usual) | SCALARS
    for name, usual in {
        "stream": True, "max_tokens": 5, "max_completion_tokens": 7, "temperature": 0.5, "top_p": 1, "seed": 3,
        "stop": "x", "n": 2, "logprobs": True, "stream_options": {"include_usage": True}, "regex": "a",
        "tools": [{"type": "function", "function": {"name": "f"}}], "response_format": {"type": "json_object"},
        "modalities": ["audio"],
    }.items()
}  # fmt: skip
BODIES = st.fixed_dictionaries({"model": st.just("m"), "messages": MESSAGES}, optional=REST)


def outcome(endpoint: Endpoint, body: dict[str, Any]) -> Any:
    """The request without its body, or its error."""
    try:
        return parse(endpoint, orjson.dumps(body))._replace(body={}, size_bytes=0)
    except RequestError as error:
        return error.code, error.param, error.message


@given(BODIES)
def test_ordinary_conversation_is_parsed_as_on_the_full_path(body: dict[str, Any]) -> None:
    messages = body["messages"]
    unusual = dict(body)
    if isinstance(messages, list):
        unusual["messages"] = [{**one, "refusal": None} if isinstance(one, dict) else one for one in messages]
    unusual.setdefault("metadata", None)
    assert outcome(Endpoint.CHAT, body) == outcome(Endpoint.CHAT, unusual)


@given(st.fixed_dictionaries({"model": st.just("m"), "prompt": st.just("Hi") | SCALARS}, optional=REST))
def test_ordinary_prompt_is_parsed_as_on_the_full_path(body: dict[str, Any]) -> None:
    assert outcome(Endpoint.COMPLETIONS, body) == outcome(Endpoint.COMPLETIONS, {**body, "suffix": None})


def test_ordinary_request_has_the_expected_result() -> None:
    """A fixed request, so that both paths cannot be wrong in the same way."""
    found = parse(Endpoint.CHAT, b'{"model":"m","messages":[{"role":"user","content":"Hi"}],"max_tokens":5}')
    assert (found.model, found.stream, found.include_usage, found.needs) == ("m", False, False, {"chat"})
    assert (found.max_tokens, found.is_plain, found.clamps_max_tokens) == (5, True, False)
    image = b'{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,"}}]}'
    assert parse(Endpoint.CHAT, b'{"model":"m","messages":[%b]}' % image).needs == {"chat", "vision"}
