"""Streams and answers in Anthropic's format: golden streams, order of blocks, stop reasons, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse

from gateway.apis.messages import messages_answer
from gateway.apis.messages.messages_answer import Bounds, MessageEvents, anthropic_usage, message_id
from gateway.apis.messages.messages_errors import envelope, frame_error
from gateway.apis.openai.frames import Comment, Data, DeltaKind, Frame
from gateway.errors import GatewayError, PassedOnError, RefusedError, RequestError, UpstreamError, UpstreamKind
from inference.protocol import Code
from tests.rigs.fake_provider.strict import strictly

GOLDEN = Path(__file__).with_name("golden") / "messages"
HEAD = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "created": 5, "model": "demo"}
USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 5,
    "total_tokens": 17,
    "prompt_tokens_details": {"cached_tokens": 8},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
PING = Comment(b": ping\n\n")


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> Data:
    choice = {"index": 0, "delta": delta or {}, "logprobs": None, "finish_reason": finish, **more}
    return Data(orjson.dumps({**HEAD, "choices": [choice]}), DeltaKind.OTHER)


def usage(counts: dict[str, Any] | None = None) -> Data:
    return Data(orjson.dumps({**HEAD, "choices": [], "usage": counts or USAGE}), DeltaKind.USAGE)


def call(index: int, arguments: str | None = None, name: str | None = None, id: str | None = None) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    piece = {"index": index, **({"id": id, "type": "function"} if id else {}), "function": function}
    return {"tool_calls": [piece]}


ROLE = chunk({"role": "assistant", "content": ""})

EMPTY_HEAD = {"id": "", "object": "", "created": 0, "model": ""}
"""Fields of the first chunk of Azure, and of later chunks of its content filter."""
FILTERED = {"hate": {"filtered": False, "severity": "safe"}}
NO_PROMPT = {
    **EMPTY_HEAD,
    "choices": [],
    "prompt_filter_results": [{"prompt_index": 0, "content_filter_results": FILTERED}],
}

STREAMS: dict[str, tuple[list[Frame], tuple[str, ...]]] = {
    "azure": (
        [
            Data(orjson.dumps(NO_PROMPT), DeltaKind.OTHER),
            PING,
            chunk({"role": "assistant", "content": "", "refusal": None}, content_filter_results={}),
            chunk({"content": "Hello"}, content_filter_results=FILTERED),
            chunk({}, finish="stop", content_filter_results={}),
        ],
        (),
    ),
    "text": ([ROLE, PING, chunk({"content": "Water"}), chunk({"content": " turns\nü"}), chunk(finish="stop")], ()),
    "tools": (
        [
            ROLE,
            chunk({"content": "I look:"}),
            chunk(call(0, "", "look", "call_a")),
            chunk(call(0, '{"at":')),
            chunk(call(0, '"x"}')),
            chunk(call(1, "{}", "hear", "call_b")),
            chunk(finish="tool_calls"),
        ],
        (),
    ),
    "thinking": (
        [
            ROLE,
            chunk({"reasoning_content": "2 + 2"}),
            chunk({"reasoning_content": " is 4."}),
            chunk({"content": "4"}),
            chunk(finish="length"),
        ],
        (),
    ),
    "stop_sequence": ([ROLE, chunk({"content": "a"}), chunk(finish="stop", stop_reason="END")], ("END",)),
    "refusal": ([ROLE, chunk({"refusal": "No."}), chunk(finish="content_filter")], ()),
    "declined": ([ROLE, chunk({"refusal": "I"}), chunk({"refusal": " won't."}), chunk(finish="stop")], ("END",)),
    "signed": (
        [
            Data(
                orjson.dumps(
                    {
                        **HEAD,
                        "id": "chatcmpl-msg_01",
                        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
                        "usage": {"prompt_tokens": 9, "completion_tokens": 1},
                    }
                ),
                DeltaKind.OTHER,
            ),
            chunk({"reasoning_content": "Hm."}),
            chunk({"thinking_blocks": [{"type": "thinking", "signature": "c2ln"}]}),
            chunk({"thinking_blocks": [{"type": "redacted_thinking", "data": "aGlk"}]}),
            chunk({"thinking_blocks": [{"type": "thinking", "signature": "b21pdHRlZA"}]}),
            chunk({"content": "Yes"}),
            chunk(finish="length", native_finish_reason="pause_turn"),
        ],
        (),
    ),
}


def written(frames: list[Frame], stops: tuple[str, ...] = ()) -> bytes:
    """The complete stream, written one frame at a time."""
    writer = MessageEvents(Bounds(stops))
    return b"".join(writer.write([frame]) for frame in [*frames, usage()]) + writer.end()


def events(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream; each one is valid for the official client."""
    found = []
    for frame in raw.decode().split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            strictly(RawMessageStreamEvent, event)
            found.append(event)
    return found


@pytest.mark.parametrize("name", STREAMS)
def test_stream_equals_the_golden_file(name: str) -> None:
    frames, stops = STREAMS[name]
    raw = written(frames, stops)
    assert raw.decode() == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert events(raw)[-1] == {"type": "message_stop"}
    writer = MessageEvents(Bounds(stops))
    assert writer.write([*frames, usage()]) + writer.end() == raw


def test_calls_with_interleaved_arguments_are_separate_blocks() -> None:
    found = events(
        written(
            [
                ROLE,
                chunk(call(0, None, "a", "c0")),
                chunk(call(1, '{"y":', "b", "c1")),
                chunk(call(0, '{"x":1}')),
                chunk(call(1, "2}")),
                chunk(call(2, "", "c", "c2")),
                chunk(call(0, " ")),
                chunk(finish="tool_calls"),
            ]
        )
    )
    pieces: dict[int, str] = {}
    open_blocks: set[int] = set()
    for event in found:
        if event["type"] == "content_block_start":
            open_blocks.add(event["index"])
        elif event["type"] == "content_block_delta":
            assert event["index"] in open_blocks
            pieces[event["index"]] = pieces.get(event["index"], "") + event["delta"]["partial_json"]
        elif event["type"] == "content_block_stop":
            open_blocks.remove(event["index"])
    assert (pieces, open_blocks) == ({0: '{"x":1}', 1: '{"y":2}'}, set())


def test_call_without_an_id_gets_one_and_stop_becomes_tool_use() -> None:
    found = events(written([ROLE, chunk(call(0, "{}", "a")), chunk(finish="stop")]))
    block = next(event["content_block"] for event in found if event["type"] == "content_block_start")
    assert (block["id"], block["name"]) == ("toolu_7_0", "a")
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def test_text_after_a_call_is_a_separate_block() -> None:
    frames = [
        ROLE, chunk(call(0, "{}", "a", "c")), chunk({"content": "So."}), chunk({"reasoning": "Hm."}),
        chunk({"content": "Yes."}), chunk(finish="stop"),
    ]  # fmt: skip
    starts = [event for event in events(written(frames)) if event["type"] == "content_block_start"]
    assert [start["content_block"]["type"] for start in starts] == ["tool_use", "text", "thinking", "text"]


def test_empty_answer_has_start_and_end() -> None:
    found = events(written([ROLE, chunk(finish="stop")]))
    assert [event["type"] for event in found] == ["message_start", "message_delta", "message_stop"]
    writer = MessageEvents(Bounds())
    assert writer.write([Data(orjson.dumps({**HEAD, "choices": None}), DeltaKind.OTHER)]).count(b"event: ") == 1
    assert b'"output_tokens":0' in writer.end()


def test_cut_stream_ends_in_an_error_event() -> None:
    writer = MessageEvents(Bounds())
    writer.write([ROLE])
    raw = writer.end_with_error(Code.MODEL_FAILED, "the answer of local/demo end_with_error off").decode()
    assert raw.startswith("event: error\ndata: ") and raw.endswith("}\n\n")
    event = json.loads(raw.split("data: ")[1])
    strictly(ErrorResponse, {**event, "error": {key: event["error"][key] for key in ("type", "message")}})
    assert event["error"]["type"] == "overloaded_error"
    assert event["error"]["details"] == {"error_code": "model_failed"}


@pytest.mark.parametrize(
    ("code", "type"),
    [
        (Code.DEADLINE_EXCEEDED, "timeout_error"),
        (Code.QUEUE_FULL, "rate_limit_error"),
        (Code.INTERNAL_ERROR, "api_error"),
        (Code.CONTEXT_LENGTH_EXCEEDED, "invalid_request_error"),
        ("overloaded_error", "overloaded_error"),
        ("a code of the provider", "api_error"),
    ],
)
def test_codes_have_error_types_of_anthropic(code: str, type: str) -> None:
    assert frame_error(code, "no")["error"]["type"] == type


def test_errors_have_the_envelope_of_anthropic() -> None:
    refused = RequestError(Code.UNSUPPORTED_PARAMETER, "no", param="tools[0].type")
    assert envelope(refused) == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "no",
            "details": {"error_code": "unsupported_parameter", "param": "tools[0].type"},
        },
        "request_id": None,
    }
    threads = RequestError(Code.UNSUPPORTED_PARAMETER, "no", param="thread")
    assert envelope(threads)["error"]["details"]["error_code"] == "thread_unsupported_request"
    full = RefusedError(Code.MEMORY_LIMIT_EXCEEDED, "no", details={"missing_bytes": 1})
    assert envelope(full)["error"]["details"] == {
        "error_code": "memory_limit_exceeded",
        "headgate": {"missing_bytes": 1},
    }
    cause = UpstreamError(UpstreamKind.STATUS, "too long", status=400, code="context_length_exceeded")
    passed_on = envelope(PassedOnError(cause, 400, "messages"))["error"]
    assert passed_on["details"] == {"error_code": "context_length_exceeded", "param": "messages"}
    types = {code: envelope(GatewayError(code, "x"))["error"]["type"] for code in Code}
    assert types[Code.INVALID_API_KEY] == "authentication_error"
    assert types[Code.PERMISSION_DENIED] == "permission_error"
    assert types[Code.MODEL_NOT_FOUND] == types[Code.NOT_FOUND] == "not_found_error"
    assert types[Code.BODY_TOO_LARGE] == "request_too_large"
    assert types[Code.METHOD_NOT_ALLOWED] == types[Code.POISON_REQUEST] == "invalid_request_error"
    assert types[Code.NO_TIER_AVAILABLE] == "overloaded_error"


@pytest.mark.parametrize(
    ("param", "own"),
    [
        ("stop", "stop_sequences"),
        ("response_format.json_schema", "output_config.format"),
        ("tools[3].function.parameters", "tools[3].input_schema"),
        ("tools[3].function.name", "tools[3].name"),
        ("messages[4].content", "messages"),
        ("max_tokens", "max_tokens"),
        ("", ""),
        (None, None),
    ],
)
def test_field_of_a_providers_error_is_translated_to_the_clients_name(param: str | None, own: str | None) -> None:
    cause = UpstreamError(UpstreamKind.STATUS, "no", status=400)
    assert envelope(PassedOnError(cause, 400, param))["error"]["details"].get("param") == own


def test_message_of_a_prompt_that_is_too_long_can_be_parsed_by_agents() -> None:
    def message(**details: Any) -> str:
        error = RequestError(Code.CONTEXT_LENGTH_EXCEEDED, "shorten it", details=details or None)
        return str(envelope(error)["error"]["message"])

    expected = "prompt is too long: 9000 tokens > 8192 maximum; shorten it"
    assert message(prompt_tokens=9000, context_length=8192) == expected
    assert message(prompt_tokens=None, context_length=8192, max_tokens=9000) == "shorten it"
    assert message() == "prompt is too long: shorten it"


def test_places_in_the_clients_body_are_kept() -> None:
    for param, own in (("messages[1].content[0].type",) * 2, ("messages[1].content[0].image_url.url", "messages")):
        refused = RequestError(Code.INVALID_REQUEST, "no", param=param)
        assert envelope(refused)["error"]["details"]["param"] == own


def completion(message: dict[str, Any], finish: str = "stop", **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish, **more}
    return {**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE}


def whole(
    message: dict[str, Any], finish: str = "stop", stops: tuple[str, ...] = (), limit: int | None = None, **more: Any
) -> dict[str, Any]:
    answer = messages_answer.whole(completion(message, finish, **more), Bounds(stops, limit))
    strictly(Message, answer)
    return answer


def test_unary_answer_is_one_message() -> None:
    assert whole({"content": "Hello", "refusal": None}) == {
        "id": "msg_7",
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 8,
            "output_tokens": 5,
            "output_tokens_details": {"thinking_tokens": 2},
        },
    }


def test_unary_answer_contains_reasoning_and_calls() -> None:
    function = {"name": "look", "arguments": '{"at":"x"}'}
    broken = {"name": "say", "arguments": "not json"}
    listed = {"name": "list", "arguments": "[1]"}
    empty = {"name": "go", "arguments": ""}
    calls = [
        {"id": id, "type": "function", "function": function}
        for id, function in (("c1", function), ("c2", broken), ("", listed), ("c4", empty))
    ]
    answer = whole({"content": None, "reasoning_content": "Hm.", "tool_calls": calls}, "tool_calls")
    assert answer["stop_reason"] == "tool_use"
    assert answer["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "headgate"},
        {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "x"}},
        {"type": "tool_use", "id": "c2", "name": "say", "input": {"arguments": "not json"}},
        {"type": "tool_use", "id": "toolu_7_2", "name": "list", "input": {"arguments": "[1]"}},
        {"type": "tool_use", "id": "c4", "name": "go", "input": {}},
    ]


def test_reasoning_tokens_that_only_the_total_contains_are_output() -> None:
    """Otherwise an answer cut at `max_tokens` while thinking looks cut by the context window."""
    answer = completion({"content": "x"}, "length")
    answer["usage"] = {"prompt_tokens": 21, "completion_tokens": 20, "total_tokens": 1021}
    message = messages_answer.whole(answer, Bounds((), 1000))
    assert (message["usage"]["output_tokens"], message["stop_reason"]) == (1000, "max_tokens")
    answer["usage"] = {"prompt_tokens": 21, "completion_tokens": 20}
    message = messages_answer.whole(answer, Bounds((), 1000))
    assert (message["usage"]["output_tokens"], message["stop_reason"]) == (20, "model_context_window_exceeded")


@pytest.mark.parametrize("odd", [None, 5, "x", []])
def test_native_usage_of_another_type_is_ignored(odd: Any) -> None:
    answer = completion({"content": "x"})
    answer["usage"] = {**USAGE, "native": odd}
    assert messages_answer.whole(answer, Bounds())["usage"] == whole({"content": "x"})["usage"]


def test_unary_answers_have_their_stop_reasons() -> None:
    text = {"content": "x"}
    assert whole(text, "length")["stop_reason"] == whole(text, "length", limit=5)["stop_reason"] == "max_tokens"
    assert whole(text, "length", limit=6)["stop_reason"] == "model_context_window_exceeded"
    met = whole(text, "stop", ("END",), stop_reason="END")
    assert (met["stop_reason"], met["stop_sequence"]) == ("stop_sequence", "END")
    assert whole(text, "stop", ("END",), stop_reason=2)["stop_reason"] == "end_turn"
    assert whole(text, "length", native_finish_reason="pause_turn")["stop_reason"] == "pause_turn"
    refused = whole({"content": None, "refusal": "No."}, "content_filter")
    assert refused["content"] == [{"type": "text", "text": "No."}]
    assert refused["stop_details"] == {"type": "refusal", "category": None, "explanation": "No."}
    declined = whole({"content": None, "refusal": "No."}, "stop")
    assert (declined["stop_reason"], declined["stop_details"]) == ("refusal", refused["stop_details"])
    assert whole({"content": "x", "refusal": "No."}, "length")["stop_reason"] == "max_tokens"
    details = {"type": "refusal", "category": "bio", "explanation": None}
    assert whole({"content": ""}, "content_filter", stop_details=details)["stop_details"] == details
    assert whole({"content": ""}, "something new")["stop_reason"] == "end_turn"


def test_signed_thinking_is_returned_unchanged() -> None:
    signed = [{"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}, {"type": "redacted_thinking", "data": "x"}]
    answer = whole({"content": "y", "reasoning_content": "Hm.", "thinking_blocks": signed})
    assert answer["content"] == [*signed, {"type": "text", "text": "y"}]


def test_invalid_counts_are_zero() -> None:
    zeros = {
        "input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0,
    }  # fmt: skip
    assert anthropic_usage(None) == anthropic_usage({"prompt_tokens": "x"}) == zeros
    written = {"cached_tokens": 3, "cache_write_tokens": 4}
    assert anthropic_usage({"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": written}) == {
        "input_tokens": 3, "cache_creation_input_tokens": 4, "cache_read_input_tokens": 3, "output_tokens": 1,
    }  # fmt: skip
    assert message_id(None) == "msg_"
    assert message_id("chatcmpl-msg_01") == "msg_01"


@pytest.mark.parametrize("late", [False, True], ids=["before its arguments", "after some of them"])
def test_call_starts_with_id_and_name_when_the_name_arrives_late(late: bool) -> None:
    name, begun = call(0, name="look"), call(0, '{"at":')
    pieces = [call(0, id="c1", name=""), call(0), *((begun, name) if late else (name, begun)), call(0, " 1}")]
    found = events(written([ROLE, *map(chunk, pieces), chunk(finish="tool_calls")]))
    (block,) = (event["content_block"] for event in found if event["type"] == "content_block_start")
    assert (block["id"], block["name"]) == ("c1", "look")
    arguments = [event["delta"]["partial_json"] for event in found if event["type"] == "content_block_delta"]
    assert json.loads("".join(arguments)) == {"at": 1}
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def test_call_without_a_name_is_dropped() -> None:
    found = events(written([ROLE, chunk(call(0, '{"at": 1}', "", "c1")), chunk(finish="tool_calls")]))
    assert [event for event in found if event["type"] == "content_block_start"] == []
    assert found[-2]["delta"]["stop_reason"] == "end_turn"
    nameless = {"id": "c1", "type": "function", "function": {"name": "", "arguments": "{}"}}
    answer = {"choices": [{"message": {"content": None, "tool_calls": [nameless]}, "finish_reason": "tool_calls"}]}
    message = messages_answer.whole(answer, Bounds())
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")
