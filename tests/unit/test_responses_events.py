"""Events of a Response: golden streams, checks with the types of the official client, failures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from openai._models import construct_type
from openai._types import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent

from gateway.apis.openai.assemble import Assembly
from gateway.apis.openai.frames import Comment, Data, DeltaKind, Frame
from gateway.apis.responses.responses_events import Head, Stream, answered, dumps
from headgate.shared.sse import SseSplitter
from inference.protocol import Code
from tests.rigs.fake_provider.strict import strictly
from tests.rigs.typed_bodies import parse_responses

GOLDEN = Path(__file__).parent / "golden" / "responses"
BODY = {"model": "demo", "input": "Hi", "stream": True, "instructions": "Be brief."}
TOOLS = [
    {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True, "description": "Adds."},
    {"type": "namespace", "name": "mcp__git", "description": "Git.", "tools": [{"type": "function", "name": "log"}]},
]
USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 5},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


def head(with_encrypted_content: bool = False, **body: Any) -> Head:
    found = parse_responses(json.dumps({**BODY, **body}).encode(), lambda _: None, lambda _: None)
    return Head("0123456789abcdef", 1700000000, "demo", found.echo, found.names, with_encrypted_content)


def chunk(delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> Data:
    """One chunk; without a delta the usage chunk."""
    logprobs = more.pop("logprobs", None)
    choices = [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]
    payload = {"id": "chatcmpl-1", "model": "demo-7b", "choices": [] if delta is None else choices, **more}
    return Data(json.dumps(payload).encode(), DeltaKind.OTHER)


def call(index: int | None, **fields: Any) -> dict[str, Any]:
    """A delta with a part of a function call."""
    function = {name: fields.pop(name) for name in ("name", "arguments") if name in fields}
    place = {} if index is None else {"index": index}
    return {"tool_calls": [{**place, **fields, "function": function}]}


def token(text: str, top: Sequence[str] = ()) -> dict[str, Any]:
    others = [{"token": other, "logprob": -2.0, "bytes": None} for other in top]
    return {"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": others}


ROLE = chunk({"role": "assistant", "content": ""})
COMMENT = Comment(b": queued 1\n\n")
EMPTY_HEAD: dict[str, Any] = {"id": "", "object": "", "created": 0, "model": "", "prompt_filter_results": []}
"""The first chunk of Azure has these empty fields."""
CASES: dict[str, tuple[Head, list[Frame]]] = {
    "azure": (
        head(),
        [chunk(None, **EMPTY_HEAD), COMMENT, chunk({"role": "assistant", "content": "", "refusal": None}),
         chunk({"content": "Hello"}), chunk({}, "stop"), chunk(None, usage=USAGE)],
    ),
    "text": (
        head(),
        [COMMENT, ROLE, chunk({"content": "Hello"}), COMMENT, chunk({"content": "!"}), chunk({}, "stop"),
         chunk(None, usage=USAGE, service_tier="flex")],
    ),
    "reasoning": (
        head(with_encrypted_content=True),
        [ROLE, chunk({"reasoning_content": "Hm"}), chunk({"reasoning": "m."}), chunk({"content": "Yes."}),
         chunk({}, "stop")],
    ),
    "calls": (
        head(tools=TOOLS),
        [ROLE, chunk({"content": "Let me."}), chunk(call(0, id="call_a", type="function", name="add", arguments="")),
         chunk(call(0, arguments='{"a"')), chunk(call(0, arguments=":1}")),
         chunk(call(1, id="call_b", type="function", name="mcp__git__log", arguments="{}")), chunk({}, "tool_calls"),
         chunk(None, usage=USAGE)],
    ),
    "refusal": (head(), [ROLE, chunk({"content": "I"}), chunk({"refusal": "No"}), chunk({"refusal": "."}, "stop")]),
    "cut_by_length": (head(max_output_tokens=2), [ROLE, chunk({"content": "Once"}), chunk({}, "length")]),
    "filtered": (head(), [ROLE, chunk({}, "content_filter")]),
    "empty": (head(), [ROLE, chunk({}, "stop")]),
    "logprobs": (
        head(include=["message.output_text.logprobs"], top_logprobs=1),
        [ROLE, chunk({"content": "A"}, logprobs={"content": [token("A", ["B"])]}),
         chunk({"content": ""}, logprobs={"content": [token("\u00f0")]}),
         chunk({"content": "x"}, logprobs={"content": [token("x")]}),
         chunk({}, "stop", logprobs={"content": [token("y")]})],
    ),
}  # fmt: skip


def streamed(request: Head, frames: Sequence[Frame]) -> bytes:
    stream = Stream(request)
    return b"".join([*(stream.feed([frame]) for frame in frames), stream.end(1700000009)])


def events(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream, after checking their names and sequence numbers."""
    found = []
    for frame in SseSplitter().feed(body):
        if frame.comment is not None:
            continue
        assert frame.data is not None and frame.event is not None
        event = json.loads(frame.data)
        assert event["type"] == frame.event.decode()
        assert event["sequence_number"] == len(found)
        found.append(event)
    return found


@pytest.mark.parametrize("name", CASES)
def test_stream_equals_the_golden_file(name: str) -> None:
    request, frames = CASES[name]
    assert streamed(request, frames) == (GOLDEN / f"{name}.txt").read_bytes()


@pytest.mark.parametrize("name", CASES)
def test_official_client_reads_the_stream(name: str) -> None:
    request, frames = CASES[name]
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=omit)
    sent = events(streamed(request, frames))
    for event in sent:
        strictly(ResponseStreamEvent, event)
        state.handle_event(cast(ResponseStreamEvent, construct_type(type_=ResponseStreamEvent, value=event)))
    last = sent[-1]
    if last["type"] == "response.completed":
        assert state._completed_response is not None
    done = [event["item"] for event in sent if event["type"] == "response.output_item.done"]
    assert last["response"]["output"] == done


@pytest.mark.parametrize("name", CASES)
def test_division_into_reads_does_not_change_the_bytes(name: str) -> None:
    request, frames = CASES[name]
    stream = Stream(request)
    assert stream.feed(frames) + stream.end(1700000009) == streamed(request, frames)
    assert stream.is_whole


@pytest.mark.parametrize("name", CASES)
def test_unary_response_equals_the_last_event_of_the_stream(name: str) -> None:

    request, frames = CASES[name]
    assembly = Assembly()
    for frame in frames:
        if isinstance(frame, Data):
            assembly.add({"object": "chat.completion.chunk", **json.loads(frame.payload)})
    whole = answered(request, assembly.result(), 1700000009).whole(1700000009)
    last = events(streamed(request, frames))[-1]["response"]
    if name == "reasoning":
        return  # no provider uses both names of reasoning
    if name == "logprobs":  # tokens without a character have another place
        assert whole["output"][0]["content"][0]["text"] == last["output"][0]["content"][0]["text"]
    assert whole == last
    strictly(Response, whole)


# --- failures ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cut", range(5))
def test_cut_stream_ends_as_failed(cut: int) -> None:
    request, frames = CASES["calls"]
    stream = Stream(request)
    body = stream.feed(frames[:cut]) + stream.end_with_error(Code.MODEL_FAILED, "the worker died")
    sent = events(body)
    assert [event["type"] for event in sent[:2]] == ["response.created", "response.in_progress"]
    failed, error = sent[-2:]
    strictly(ResponseStreamEvent, failed)
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "the worker died"}
    assert all(item["status"] in ("completed", "incomplete") for item in failed["response"]["output"])
    strictly(ResponseStreamEvent, {name: value for name, value in error.items() if name != "error"})
    assert (error["type"], error["code"], error["message"]) == ("error", "model_failed", "the worker died")
    assert error["error"]["message"] == "the worker died"
    assert not stream.is_whole
    assert stream.end(1) == stream.end_with_error("x", "y") == stream.feed(frames[cut:]) == b""


def test_unfinished_item_is_incomplete() -> None:
    request, frames = CASES["calls"]
    stream = Stream(request)
    body = stream.feed(frames[:4]) + stream.end_with_error("upstream_code", "gone")
    output = events(body)[-2]["response"]["output"]
    assert [(item["type"], item["status"]) for item in output] == [
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]
    assert output[1]["arguments"] == '{"a"'


@pytest.mark.parametrize(
    ("code", "api_code"), [(Code.QUEUE_FULL, "rate_limit_exceeded"), (Code.DEADLINE_EXCEEDED, "server_error"),
                           ("their_own", "server_error")]
)  # fmt: skip
def test_error_codes_are_those_of_the_api(code: str, api_code: str) -> None:
    assert events(Stream(head()).end_with_error(code, "x"))[-2]["response"]["error"]["code"] == api_code


# --- unusual providers ------------------------------------------------------------------------------------------------
def output(*frames: Frame, request: Head | None = None) -> list[dict[str, Any]]:
    sent = events(streamed(request or head(tools=TOOLS), [ROLE, *frames]))
    assert sent[-1]["type"] == "response.completed"
    found: list[dict[str, Any]] = sent[-1]["response"]["output"]
    return found


def test_calls_are_separated_also_with_repeated_names_or_without_index_or_id() -> None:
    items = output(
        chunk(call(0, id="a", name="add", arguments="{")),
        chunk(call(0, id="a", name="add", arguments="}")),
        chunk(call(0, id="b", name="add", arguments="{}")),
        chunk(call(None, name="add", arguments="")),
        chunk(call(None, arguments="[]")),
        chunk({"tool_calls": [{"index": 7, "id": "z"}, {"index": 7, "function": {"name": "odd"}}, "junk"]}),
        chunk({}, "tool_calls"),
    )
    assert [(item["call_id"], item["name"], item["arguments"]) for item in items] == [
        ("a", "add", "{}"), ("b", "add", "{}[]"), ("z", "odd", "{}"),
    ]  # fmt: skip


def test_complete_call_without_arguments_has_an_empty_object() -> None:
    """Agents parse arguments as JSON. A cut call keeps its empty text."""
    for finish, arguments in (("tool_calls", "{}"), ("length", "")):
        sent = events(streamed(head(tools=TOOLS), [ROLE, chunk(call(0, id="a", name="add")), chunk({}, finish)]))
        assert sent[-1]["response"]["output"][0]["arguments"] == arguments
        assert "".join(one["delta"] for one in sent if one["type"].endswith("arguments.delta")) == arguments


def test_call_without_an_id_gets_one() -> None:
    items = output(chunk(call(0, name="add", arguments="{}")), chunk({}, "stop"))
    assert items[0]["call_id"] == "call_0123456789abcdef00"


def test_call_starts_with_id_and_name_when_the_name_arrives_late() -> None:
    items = output(
        chunk(call(0, id="a", name="add", arguments="{}")), chunk(call(1, id="b", name="")),
        chunk(call(1, arguments='{"b"')), chunk(call(1, name="add")), chunk(call(1, arguments=":1}")),
        chunk({}, "tool_calls"),
    )  # fmt: skip
    assert [(item["call_id"], item["name"], item["arguments"]) for item in items] == [
        ("a", "add", "{}"), ("b", "add", '{"b":1}'),
    ]  # fmt: skip


def test_call_without_a_name_is_dropped() -> None:
    items = output(chunk(call(0, id="a", arguments="{}")), chunk({}, "tool_calls"))
    assert [item["type"] for item in items] == ["message"]


def test_text_after_a_call_and_reasoning_after_text_are_separate_items() -> None:
    items = output(
        chunk({"content": "a"}), chunk({"reasoning_content": "b"}), chunk({"reasoning_content": "c"}),
        chunk(call(0, id="x", name="add", arguments="{}")), chunk({"content": "d"}), chunk({}, "stop"),
    )  # fmt: skip
    assert [item["type"] for item in items] == ["message", "reasoning", "function_call", "message"]
    assert len({item["id"] for item in items}) == 4


def test_logprobs_of_reasoning_are_not_those_of_the_text() -> None:
    items = output(
        chunk({"reasoning_content": "b"}, logprobs={"content": [token("b")]}),
        chunk({"content": "c"}, logprobs={"content": [token("c")]}),
        chunk({}, "stop", logprobs={"content": None}),
    )
    assert [entry["token"] for entry in items[1]["content"][0]["logprobs"]] == ["c"]


def test_calls_with_interleaved_arguments_are_separate_items() -> None:
    frames = [
        ROLE, chunk(call(0, id="a", name="add", arguments="")), chunk(call(1, id="b", name="add", arguments='{"b"')),
        chunk(call(0, arguments="{}")), chunk(call(1, arguments=":1}")), chunk({"content": "Done."}),
    ]  # fmt: skip
    sent = events(streamed(head(tools=TOOLS), [*frames, chunk({}, "tool_calls")]))
    items = sent[-1]["response"]["output"]
    assert [(item["type"], item.get("arguments")) for item in items] == [
        ("function_call", "{}"), ("function_call", '{"b":1}'), ("message", None),
    ]  # fmt: skip
    done = [event["item"] for event in sent if event["type"] == "response.output_item.done"]
    assert sorted(done, key=lambda item: str(item["id"])[-2:]) == items
    cut = events(streamed(head(tools=TOOLS), [*frames[:3], chunk({}, "length")]))[-1]["response"]
    assert [item["status"] for item in cut["output"]] == ["incomplete", "incomplete"]


def test_arguments_for_a_finished_call_fail_the_response() -> None:
    stream = Stream(head(tools=TOOLS))
    body = stream.feed(
        [ROLE, chunk(call(0, id="a", name="add", arguments="{}")), chunk(call(1, id="b", name="add", arguments="{}")),
         chunk(call(0, arguments="}")), chunk({}, "tool_calls")]
    ) + stream.end(1)  # fmt: skip
    sent = events(body)
    assert [event["type"] for event in sent[-2:]] == ["response.failed", "error"]
    assert not stream.is_whole


def test_context_length_error_has_the_event_order_of_openai() -> None:
    """LangChain reads the `error` event, agents read the code in `response.failed`."""
    sent = events(Stream(head()).end_with_error(Code.CONTEXT_LENGTH_EXCEEDED, "too long"))
    assert [event["type"] for event in sent[-2:]] == ["error", "response.failed"]
    assert (sent[-2]["code"], sent[-2]["error"]["code"]) == ("context_length_exceeded", "context_length_exceeded")
    assert sent[-1]["response"]["error"] == {"code": "context_length_exceeded", "message": "too long"}


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"model": "m"},
        {"model": "m", "choices": None},
        {"choices": [None]},
        {"choices": [{"index": 1, "delta": {"content": "no"}}, {"delta": None}, {"delta": {"content": 5}}]},
    ],
)
def test_other_choices_and_invalid_chunks_are_ignored(odd: dict[str, Any]) -> None:
    usage = chunk(None, usage={"prompt_tokens": "?"})
    items = output(Data(json.dumps(odd).encode(), DeltaKind.OTHER), chunk({"content": "yes"}), chunk({}, "stop"), usage)
    assert [item["content"][0]["text"] for item in items] == ["yes"]


def test_missing_total_of_tokens_is_computed() -> None:
    sent = events(streamed(head(), [ROLE, chunk(None, usage={"prompt_tokens": 3, "completion_tokens": 4})]))
    assert sent[-1]["response"]["usage"]["total_tokens"] == 7


def test_lone_surrogate_stays_an_escape() -> None:
    payload = b'{"model":"m","choices":[{"index":0,"delta":{"content":"\\ud83d"},"finish_reason":"stop"}]}'
    body = streamed(head(), [Data(payload, DeltaKind.CONTENT)])
    assert b'"delta":"\\ud83d"' in body
    assert events(body)[-1]["response"]["output"][0]["content"][0]["text"] == "\ud83d"
    assert dumps({"a": "\ud83d"}) == b'{"a":"\\ud83d"}'
