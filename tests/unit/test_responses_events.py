"""The events of a Response, byte for byte: golden streams, the official client's own types, and what breaks off."""

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

from gateway.apis.openai.frames import Comment, Data, DeltaKind, Frame
from gateway.apis.responses.responses_events import Head, Stream, answered, dumps
from gateway.apis.responses.responses_request import parse
from headgate.shared.sse import SseSplitter
from inference.protocol import Code
from tests.rigs.fake_provider.strict import strictly

GOLDEN = Path(__file__).parent / "golden" / "responses"
ASKED = {"model": "demo", "input": "Hi", "stream": True, "instructions": "Be brief."}
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


def head(seals: bool = False, **body: Any) -> Head:
    found = parse(json.dumps({**ASKED, **body}).encode(), lambda _: None, lambda _: None)
    return Head("0123456789abcdef", 1700000000, "demo", found.echo, found.names, seals)


def chunk(delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> Data:
    """One chunk; without a delta the usage chunk."""
    logprobs = more.pop("logprobs", None)
    choices = [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]
    payload = {"id": "chatcmpl-1", "model": "demo-7b", "choices": [] if delta is None else choices, **more}
    return Data(json.dumps(payload).encode(), DeltaKind.OTHER)


def call(index: int | None, **fields: Any) -> dict[str, Any]:
    """A delta with one piece of a function call."""
    function = {name: fields.pop(name) for name in ("name", "arguments") if name in fields}
    place = {} if index is None else {"index": index}
    return {"tool_calls": [{**place, **fields, "function": function}]}


def token(text: str, top: Sequence[str] = ()) -> dict[str, Any]:
    others = [{"token": other, "logprob": -2.0, "bytes": None} for other in top]
    return {"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": others}


ROLE = chunk({"role": "assistant", "content": ""})
COMMENT = Comment(b": queued 1\n\n")
NOBODY: dict[str, Any] = {"id": "", "object": "", "created": 0, "model": "", "prompt_filter_results": []}
"""What Azure's first chunk says of itself."""
CASES: dict[str, tuple[Head, list[Frame]]] = {
    "azure": (
        head(),
        [chunk(None, **NOBODY), COMMENT, chunk({"role": "assistant", "content": "", "refusal": None}),
         chunk({"content": "Hello"}), chunk({}, "stop"), chunk(None, usage=USAGE)],
    ),
    "text": (
        head(),
        [COMMENT, ROLE, chunk({"content": "Hello"}), COMMENT, chunk({"content": "!"}), chunk({}, "stop"),
         chunk(None, usage=USAGE, service_tier="flex")],
    ),
    "reasoning": (
        head(seals=True),
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


def streamed(asked: Head, frames: Sequence[Frame]) -> bytes:
    stream = Stream(asked)
    return b"".join([*(stream.feed([frame]) for frame in frames), stream.end(1700000009)])


def events(body: bytes) -> list[dict[str, Any]]:
    """The events in a stream; each is named as its type says and numbered by its place."""
    found = []
    for frame in SseSplitter().feed(body):
        if frame.is_comment:
            continue
        assert frame.data is not None and frame.event is not None
        event = json.loads(frame.data)
        assert event["type"] == frame.event.decode()
        assert event["sequence_number"] == len(found)
        found.append(event)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_golden_stream(name: str) -> None:
    asked, frames = CASES[name]
    assert streamed(asked, frames) == (GOLDEN / f"{name}.txt").read_bytes()


@pytest.mark.parametrize("name", CASES)
def test_every_event_is_what_the_official_client_expects(name: str) -> None:
    asked, frames = CASES[name]
    for event in events(streamed(asked, frames)):
        strictly(ResponseStreamEvent, event)


@pytest.mark.parametrize("name", CASES)
def test_the_official_client_reads_the_stream_as_the_whole_answer(name: str) -> None:
    asked, frames = CASES[name]
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=omit)
    said = events(streamed(asked, frames))
    for event in said:
        state.handle_event(cast(ResponseStreamEvent, construct_type(type_=ResponseStreamEvent, value=event)))
    last = said[-1]
    if last["type"] == "response.completed":
        assert state._completed_response is not None
    done = [event["item"] for event in said if event["type"] == "response.output_item.done"]
    assert last["response"]["output"] == done


@pytest.mark.parametrize("name", CASES)
def test_frames_that_come_together_are_the_same_bytes(name: str) -> None:
    asked, frames = CASES[name]
    stream = Stream(asked)
    assert stream.feed(frames) + stream.end(1700000009) == streamed(asked, frames)
    assert stream.is_whole


@pytest.mark.parametrize("name", CASES)
def test_a_whole_answer_is_the_last_event_of_its_stream(name: str) -> None:
    """The same words asked for whole give the same Response."""
    from gateway.apis.openai.assemble import Assembly

    asked, frames = CASES[name]
    assembly = Assembly()
    for frame in frames:
        if isinstance(frame, Data):
            assembly.add({"object": "chat.completion.chunk", **json.loads(frame.payload)})
    whole = answered(asked, assembly.result(), 1700000009).whole(1700000009)
    last = events(streamed(asked, frames))[-1]["response"]
    if name == "reasoning":
        return  # its two names for reasoning never come from one tier
    if name == "logprobs":  # tokens that made no character stand where they came
        assert whole["output"][0]["content"][0]["text"] == last["output"][0]["content"][0]["text"]
    assert whole == last
    strictly(Response, whole)


# --- broken off -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cut", range(5))
def test_a_stream_that_breaks_off_fails_and_is_no_completed_one(cut: int) -> None:
    asked, frames = CASES["calls"]
    stream = Stream(asked)
    body = stream.feed(frames[:cut]) + stream.broke(Code.MODEL_FAILED, "the worker died")
    said = events(body)
    assert [event["type"] for event in said[:2]] == ["response.created", "response.in_progress"]
    failed, error = said[-2:]
    strictly(ResponseStreamEvent, failed)
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "the worker died"}
    assert all(item["status"] in ("completed", "incomplete") for item in failed["response"]["output"])
    strictly(ResponseStreamEvent, {name: value for name, value in error.items() if name != "error"})
    assert (error["type"], error["code"], error["message"]) == ("error", "model_failed", "the worker died")
    assert error["error"]["message"] == "the worker died"
    assert not stream.is_whole
    assert stream.end(1) == stream.broke("x", "y") == stream.feed(frames[cut:]) == b""


def test_an_unfinished_item_is_told_as_incomplete() -> None:
    asked, frames = CASES["calls"]
    stream = Stream(asked)
    body = stream.feed(frames[:4]) + stream.broke("upstream_word", "gone")
    output = events(body)[-2]["response"]["output"]
    assert [(item["type"], item["status"]) for item in output] == [
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]
    assert output[1]["arguments"] == '{"a"'


@pytest.mark.parametrize(
    ("code", "said"), [(Code.QUEUE_FULL, "rate_limit_exceeded"), (Code.DEADLINE_EXCEEDED, "server_error"),
                       ("their_own", "server_error")]
)  # fmt: skip
def test_why_it_failed_is_in_the_words_of_the_api(code: str, said: str) -> None:
    assert events(Stream(head()).broke(code, "x"))[-2]["response"]["error"]["code"] == said


# --- odd tiers --------------------------------------------------------------------------------------------------------
def output(*frames: Frame, asked: Head | None = None) -> list[dict[str, Any]]:
    said = events(streamed(asked or head(tools=TOOLS), [ROLE, *frames]))
    assert said[-1]["type"] == "response.completed"
    found: list[dict[str, Any]] = said[-1]["response"]["output"]
    return found


def test_calls_that_repeat_their_name_or_leave_out_index_or_id_are_still_told_apart() -> None:
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


def test_a_call_without_arguments_has_an_empty_object_unless_it_was_cut() -> None:
    """Agents parse them as JSON, and gave up at an empty text."""
    for finish, arguments in (("tool_calls", "{}"), ("length", "")):
        said = events(streamed(head(tools=TOOLS), [ROLE, chunk(call(0, id="a", name="add")), chunk({}, finish)]))
        assert said[-1]["response"]["output"][0]["arguments"] == arguments
        assert "".join(one["delta"] for one in said if one["type"].endswith("arguments.delta")) == arguments


def test_a_call_without_an_id_gets_one() -> None:
    items = output(chunk(call(0, name="add", arguments="{}")), chunk({}, "stop"))
    assert items[0]["call_id"] == "call_0123456789abcdef00"


def test_a_call_that_is_named_after_its_id_begins_with_both() -> None:
    """Arguments that came before the name ended the answer as failed."""
    items = output(
        chunk(call(0, id="a", name="add", arguments="{}")), chunk(call(1, id="b", name="")),
        chunk(call(1, arguments='{"b"')), chunk(call(1, name="add")), chunk(call(1, arguments=":1}")),
        chunk({}, "tool_calls"),
    )  # fmt: skip
    assert [(item["call_id"], item["name"], item["arguments"]) for item in items] == [
        ("a", "add", "{}"), ("b", "add", '{"b":1}'),
    ]  # fmt: skip


def test_a_call_that_never_gets_a_name_is_none() -> None:
    items = output(chunk(call(0, id="a", arguments="{}")), chunk({}, "tool_calls"))
    assert [item["type"] for item in items] == ["message"]


def test_text_after_a_call_and_thoughts_after_text_are_items_of_their_own() -> None:
    items = output(
        chunk({"content": "a"}), chunk({"reasoning_content": "b"}), chunk({"reasoning_content": "c"}),
        chunk(call(0, id="x", name="add", arguments="{}")), chunk({"content": "d"}), chunk({}, "stop"),
    )  # fmt: skip
    assert [item["type"] for item in items] == ["message", "reasoning", "function_call", "message"]
    assert len({item["id"] for item in items}) == 4


def test_tokens_of_thoughts_and_calls_are_no_logprobs_of_the_text() -> None:
    items = output(
        chunk({"reasoning_content": "b"}, logprobs={"content": [token("b")]}),
        chunk({"content": "c"}, logprobs={"content": [token("c")]}),
        chunk({}, "stop", logprobs={"content": None}),
    )
    assert [entry["token"] for entry in items[1]["content"][0]["logprobs"]] == ["c"]


def test_calls_whose_arguments_come_in_turns_are_told_side_by_side() -> None:
    frames = [
        ROLE, chunk(call(0, id="a", name="add", arguments="")), chunk(call(1, id="b", name="add", arguments='{"b"')),
        chunk(call(0, arguments="{}")), chunk(call(1, arguments=":1}")), chunk({"content": "Done."}),
    ]  # fmt: skip
    said = events(streamed(head(tools=TOOLS), [*frames, chunk({}, "tool_calls")]))
    items = said[-1]["response"]["output"]
    assert [(item["type"], item.get("arguments")) for item in items] == [
        ("function_call", "{}"), ("function_call", '{"b":1}'), ("message", None),
    ]  # fmt: skip
    done = [event["item"] for event in said if event["type"] == "response.output_item.done"]
    assert sorted(done, key=lambda item: str(item["id"])[-2:]) == items
    cut = events(streamed(head(tools=TOOLS), [*frames[:3], chunk({}, "length")]))[-1]["response"]
    assert [item["status"] for item in cut["output"]] == ["incomplete", "incomplete"]


def test_arguments_of_a_call_that_had_ended_end_the_answer_as_failed() -> None:
    stream = Stream(head(tools=TOOLS))
    body = stream.feed(
        [ROLE, chunk(call(0, id="a", name="add", arguments="{}")), chunk(call(1, id="b", name="add", arguments="{}")),
         chunk(call(0, arguments="}")), chunk({}, "tool_calls")]
    ) + stream.end(1)  # fmt: skip
    said = events(body)
    assert [event["type"] for event in said[-2:]] == ["response.failed", "error"]
    assert not stream.is_whole


def test_prompt_too_long_for_the_model_ends_a_stream_as_openai_does() -> None:
    """LangChain recognises the exception of the `error` event, agents the code in `response.failed`."""
    said = events(Stream(head()).broke(Code.CONTEXT_LENGTH_EXCEEDED, "too long"))
    assert [event["type"] for event in said[-2:]] == ["error", "response.failed"]
    assert (said[-2]["code"], said[-2]["error"]["code"]) == ("context_length_exceeded", "context_length_exceeded")
    assert said[-1]["response"]["error"] == {"code": "context_length_exceeded", "message": "too long"}


def test_other_choices_and_odd_values_are_passed_over() -> None:
    payload = {"choices": [{"index": 1, "delta": {"content": "no"}}, {"delta": None}, {"delta": {"content": 5}}]}
    odd = Data(json.dumps(payload).encode(), DeltaKind.OTHER)
    items = output(odd, chunk({"content": "yes"}), chunk({}, "stop"), chunk(None, usage={"prompt_tokens": "?"}))
    assert [item["content"][0]["text"] for item in items] == ["yes"]


@pytest.mark.parametrize("odd", [{}, {"model": "m"}, {"model": "m", "choices": None}, {"choices": [None]}])
def test_a_chunk_without_choices_says_nothing(odd: dict[str, Any]) -> None:
    items = output(Data(json.dumps(odd).encode(), DeltaKind.OTHER), chunk({"content": "yes"}), chunk({}, "stop"))
    assert [item["content"][0]["text"] for item in items] == ["yes"]


def test_a_total_is_added_up_where_a_tier_leaves_it_out() -> None:
    said = events(streamed(head(), [ROLE, chunk(None, usage={"prompt_tokens": 3, "completion_tokens": 4})]))
    assert said[-1]["response"]["usage"]["total_tokens"] == 7


def test_half_an_emoji_goes_out_as_the_escape_it_came_as() -> None:
    payload = b'{"model":"m","choices":[{"index":0,"delta":{"content":"\\ud83d"},"finish_reason":"stop"}]}'
    body = streamed(head(), [Data(payload, DeltaKind.CONTENT)])
    assert b'"delta":"\\ud83d"' in body
    assert events(body)[-1]["response"]["output"][0]["content"][0]["text"] == "\ud83d"
    assert dumps({"a": "\ud83d"}) == b'{"a":"\\ud83d"}'
