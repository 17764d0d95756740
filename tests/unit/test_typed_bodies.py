"""Decoding of request bodies: fields that clients cannot send, unknown fields, and error messages with the path."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from gateway.apis.messages import messages_request
from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import ChatRequest, changed, parse
from gateway.errors import RequestError
from gateway.routing.resume_policy import why_not_resumable
from headgate.shared.bodies.body_decoder import as_json, decode
from headgate.shared.bodies.openai_bodies import AnswerSoFar, Message
from inference.protocol import Code
from tests.rigs.typed_bodies import chat, parse_responses, to_anthropic, unsupported_by_anthropic

HI = {"role": "user", "content": "Hi"}


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(Endpoint.CHAT, json.dumps({"model": "m", "messages": [HI], **fields}).encode())
    return caught.value


@pytest.mark.parametrize(
    "name", ["origin", "$origin", "$has_extra", "from_messages", "$from_messages", "answer_so_far", "$answer_so_far"]
)
def test_internal_fields_cannot_be_sent_and_are_not_suggested(name: str) -> None:
    error = refused(**{name: True})
    assert (error.param, error.code) == (name, Code.UNSUPPORTED_PARAMETER)
    assert f"did you mean `{name}`" not in error.message


def test_unknown_nested_fields_are_sent_on() -> None:
    body = {
        "model": "m",
        "messages": [
            {**HI, "cache": {"a": 1}},
            {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "n", "input": "i"}}],
            },
        ],
        "tools": [{"type": "custom", "custom": {"name": "n"}}],
    }
    assert as_json(chat(body)) == body


def test_unknown_fields_cannot_replace_known_ones() -> None:
    body = chat({"messages": [{**HI, "$extra": {"role": "system"}}]})
    assert body.messages[0].role == "user"
    assert as_json(body)["messages"][0]["role"] == "user"
    named = ChatRequest(model="m", messages=[Message(role="user", content="Hi", extra={"role": "x", "y": 1})])
    named.has_extra = True
    assert as_json(named)["messages"] == [{**HI, "y": 1}]


def test_answer_so_far_is_encoded_and_the_origin_is_not() -> None:
    raw = {"model": "m", "max_tokens": 5, "messages": [HI]}
    body = messages_request.parse(json.dumps(raw).encode()).body
    assert isinstance(body, ChatRequest) and body.origin is not None
    assert as_json(body) == raw
    resumed = changed(body, answer_so_far=AnswerSoFar(content="one"))
    assert resumed.origin is None and resumed.from_messages
    assert as_json(resumed) == {**raw, "answer_so_far": {"content": "one"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [None]}, "`messages[0]` must be an object, not null"),
        ({"messages": [{"role": "user", "content": 5}]}, "`messages[0].content` must be a string or an array of parts"),
        ({"messages": [{"role": "user", "content": [5]}]}, "`messages[0].content[0]` must be an object, not a number"),
        ({"temperature": 3}, "`temperature` must be between 0 and 2; it is 3"),
        ({"n": 0}, "`n` must be between 1 and 128; it is 0"),
        ({"tools": [{"type": "magic"}]}, "`tools[0].type` must be one of custom, function; it is 'magic'"),
        ({"tools": [{"type": True}]}, "`tools[0].type` must be one of custom, function, not a boolean"),
        ({"stop": ["x"] * 17}, "`stop` may hold at most 16 items; it has 17"),
        ({"model": "x" * 257}, "`model` may hold at most 256 characters; it has 257"),
        ({"top_logprobs": 21, "logprobs": True}, "`top_logprobs` must be between 0 and 20; it is 21"),
    ],
)
def test_error_names_the_parameter_and_the_accepted_values(fields: dict[str, Any], message: str) -> None:
    assert refused(**fields).message.startswith(message)


def test_error_of_a_range_without_maximum_names_the_minimum() -> None:
    with pytest.raises(RequestError, match="`dimensions` must be at least 1; it is 0"):
        parse(Endpoint.EMBEDDINGS, b'{"model":"m","input":"x","dimensions":0}')


def test_null_and_empty_values_of_unsupported_fields_are_ignored() -> None:
    raw = {"model": "m", "max_tokens": 5, "messages": [HI], "container": None, "mcp_servers": []}
    assert messages_request.parse(json.dumps(raw).encode()).max_tokens == 5


@pytest.mark.parametrize(("limit", "is_accepted"), [(-1, True), (1, True), (0, False)])
def test_max_output_tokens_is_positive_or_minus_one(limit: int, is_accepted: bool) -> None:
    raw = json.dumps({"model": "m", "input": "Hi", "max_output_tokens": limit}).encode()
    if is_accepted:
        parse_responses(raw, lambda _: None, lambda _: None)
        return
    with pytest.raises(RequestError, match="`max_output_tokens` must be between 1 and"):
        parse_responses(raw, lambda _: None, lambda _: None)


def test_refusals_in_a_history_are_text_for_anthropic() -> None:
    history = [HI, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, HI]
    turns = to_anthropic({"messages": history}, "claude-opus-5")["messages"]
    assert turns[1]["content"] == [{"type": "text", "text": "No."}]


def test_image_that_is_not_base64_is_unsupported_by_anthropic() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,x"}}
    found = unsupported_by_anthropic({"messages": [{"role": "user", "content": [image]}]})
    assert tuple(found) == ("messages[0].content",)


def test_deprecated_functions_need_the_capability_tools() -> None:
    raw = json.dumps({"model": "m", "messages": [HI], "functions": [{"name": "f"}], "function_call": "auto"}).encode()
    assert parse(Endpoint.CHAT, raw).needs == {"chat", "tools"}


def test_requests_without_a_stream_are_not_resumed() -> None:
    assert why_not_resumable(parse(Endpoint.EMBEDDINGS, b'{"model":"m","input":"x"}'), "any") == "shape"


def test_null_fields_are_absent_after_decoding() -> None:
    body = decode({"model": "m", "messages": [HI], "temperature": None, "stop": None}, ChatRequest, "/v1")
    assert as_json(body) == {"model": "m", "messages": [HI]}


def test_unknown_fields_of_structured_outputs_are_sent_on_for_completions() -> None:
    shape = {"regex": "a+", "whitespace_pattern": " "}
    raw = json.dumps({"model": "m", "prompt": "x", "structured_outputs": shape}).encode()
    assert as_json(parse(Endpoint.COMPLETIONS, raw).body)["structured_outputs"] == shape


def test_unknown_fields_of_stream_options_are_sent_on_for_completions() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    raw = json.dumps({"model": "m", "prompt": "x", "stream": True, "stream_options": options}).encode()
    assert as_json(parse(Endpoint.COMPLETIONS, raw).body)["stream_options"] == options


def test_schema_of_a_tool_must_be_of_an_object() -> None:
    tool = {"name": "t", "input_schema": {"type": "array"}}
    raw = json.dumps({"model": "m", "max_tokens": 5, "messages": [HI], "tools": [tool]}).encode()
    with pytest.raises(RequestError) as caught:
        messages_request.parse(raw)
    assert caught.value.param == "tools[0].input_schema.type"


def test_position_of_invalid_json_in_a_long_body_is_not_computed() -> None:
    with pytest.raises(RequestError) as caught:
        parse(Endpoint.CHAT, b'{"user": "%b", "temperature": NaN}' % (b"x" * 2**20))
    assert (caught.value.code, caught.value.param) == (Code.INVALID_JSON, None)


def test_first_bodies_are_decoded_in_several_threads() -> None:
    """In a process of its own, because two conversions that prepare one type at once would end it by SIGSEGV."""
    program = """
import sys, threading
import msgspec
from headgate.shared.bodies.body_decoder import Body, decode
sys.setswitchinterval(1e-6)
given = {"messages": [{"role": "user"}]}
def run(start, body):
    start.wait()
    decode(given, body, "")
for number in range(30):
    fields = [(f"field_{at}", "int | None", None) for at in range(20)]
    inner = msgspec.defstruct("Inner", [*fields, ("role", "str", "")])
    body = msgspec.defstruct("Outer", [("messages", list[inner])], bases=(Body,), kw_only=True)
    start = threading.Barrier(8)
    threads = [threading.Thread(target=run, args=(start, body)) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
