"""The events of the Responses API are one valid, numbered sequence that adds up, however the answer is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.apis.openai.frames import Comment, Data, DeltaKind, Frame
from gateway.apis.responses.responses_events import Head, Stream
from headgate.shared.sse import SseSplitter
from tests.rigs.typed_bodies import parse_responses

pytestmark = pytest.mark.unmeasured

_ASKED = parse_responses(b'{"model":"m","input":"x"}', lambda _: None, lambda _: None)
_HEAD = Head("ab", 1, "m", _ASKED.echo, _ASKED.names)
_WORDS = st.text(max_size=5)
_CALLS = st.lists(st.tuples(st.sampled_from(["f", "g"]), st.lists(_WORDS, max_size=3)), max_size=3)
_ENDS = st.sampled_from(["stop", "tool_calls", "length", "content_filter"])


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[dict[str, Any]], str]:
    """The deltas of one answer in a possible order, and its finish reason."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    kinds = draw(st.lists(st.sampled_from(["content", "reasoning_content", "refusal"]), max_size=8))
    deltas += [{kind: draw(_WORDS)} for kind in kinds]
    calls = draw(_CALLS)
    in_turns = draw(st.booleans())
    pieces_of: list[list[dict[str, Any]]] = []
    for index, (name, pieces) in enumerate(calls):
        function = {"name": name, "arguments": ""}
        begin = {"tool_calls": [{"index": index, "id": f"c{index}", "function": function}]}
        more = [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in ["(", *pieces]]
        pieces_of.append([begin, *more])
    if in_turns:
        deltas += [piece for turn in itertools.zip_longest(*pieces_of) for piece in turn if piece is not None]
    else:
        deltas += itertools.chain(*pieces_of)
    return deltas, draw(_ENDS)


def frames_of(deltas: Sequence[dict[str, Any]], finish: str) -> list[Frame]:
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    payloads = [{"model": "m", "choices": [choice]} for choice in choices]
    return [Data(json.dumps(payload).encode(), DeltaKind.OTHER) for payload in payloads]


def events(body: bytes) -> list[dict[str, Any]]:
    frames = [frame for frame in SseSplitter().feed(body) if frame.comment is None]
    found = [json.loads(frame.data or b"") for frame in frames]
    assert [event["type"].encode() for event in found] == [frame.event for frame in frames]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def check(sent: Sequence[dict[str, Any]], ends: Sequence[str]) -> None:
    """The order of the API: created, in progress, whole items one after another (calls may overlap), one end."""
    kinds = [event["type"] for event in sent]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert tuple(kinds[-len(ends) :]) == tuple(ends)
    assert not {*kinds[2 : -len(ends)]} & {"response.completed", "response.incomplete", "response.failed", "error"}
    opened: dict[int, str] = {}
    deltas: dict[tuple[int, int | None], list[str]] = {}
    count = 0
    for event in sent[2 : -len(ends)]:
        kind, index = event["type"], event["output_index"]
        if kind == "response.output_item.added":
            assert set(opened.values()) <= {"function_call"}
            assert index == count
            opened[index], count = event["item"]["type"], count + 1
        assert index in opened
        place = (index, event.get("content_index"))
        if kind.endswith(".delta"):
            deltas.setdefault(place, []).append(event["delta"])
        for name in ("text", "refusal", "arguments"):
            if kind.endswith(".done") and name in event:
                assert event[name] == "".join(deltas.get(place, []))
        if kind == "response.output_item.done":
            del opened[index]
    assert not opened or ends[0] == "response.failed"


@given(answers(), st.data())
def test_every_answer_is_a_valid_sequence_of_events(
    answer: tuple[list[dict[str, Any]], str], data: st.DataObject
) -> None:
    frames = frames_of(*answer)
    for place in sorted(data.draw(st.sets(st.integers(0, len(frames)), max_size=3)), reverse=True):
        frames.insert(place, Comment(b": busy\n\n"))
    one = Stream(_HEAD)
    alone = b"".join([*(one.feed([frame]) for frame in frames), one.end(2)])
    other = Stream(_HEAD)
    cut = data.draw(st.integers(0, len(frames)))
    assert other.feed(frames[:cut]) + other.feed(frames[cut:]) + other.end(2) == alone
    sent = events(alone)
    is_cut = answer[1] in ("length", "content_filter")
    check(sent, ["response.incomplete" if is_cut else "response.completed"])
    done = [event["item"] for event in sent if event["type"] == "response.output_item.done"]
    assert sent[-1]["response"]["output"] == sorted(done, key=lambda item: int(item["id"][-2:]))
    assert alone.count(b": busy\n\n") == sum(isinstance(frame, Comment) for frame in frames)


@given(answers(), st.data())
def test_interrupted_answer_ends_with_response_failed_and_an_error(
    answer: tuple[list[dict[str, Any]], str], data: st.DataObject
) -> None:
    frames = frames_of(*answer)
    stream = Stream(_HEAD)
    body = stream.feed(frames[: data.draw(st.integers(0, len(frames)))]) + stream.end_with_error("model_failed", "gone")
    check(events(body), ["response.failed", "error"])


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["index", "id", "function", "name", "arguments", "token"]), inner, max_size=3)
    ),
    max_leaves=8,
)
_NAMES = ["content", "reasoning_content", "reasoning", "refusal", "tool_calls", "role"]


@given(
    st.lists(st.tuples(st.dictionaries(st.sampled_from(_NAMES), _JSON, max_size=3), _JSON, _JSON), max_size=4), _JSON
)
def test_any_json_in_the_fields_of_a_chunk_gives_valid_events(sent: list[tuple[Any, Any, Any]], usage: Any) -> None:
    stream = Stream(_HEAD)
    body = b""
    for delta, logprobs, finish in sent:
        choice = {"index": 0, "delta": delta, "logprobs": {"content": logprobs}, "finish_reason": finish}
        payload = {"model": usage, "choices": [choice], "usage": usage}
        body += stream.feed([Data(json.dumps(payload).encode(), DeltaKind.OTHER)])
    sent = events(body + stream.end(2))
    check(sent, ["response.failed", "error"] if stream.answer.has_late_arguments else [sent[-1]["type"]])


@given(answers())
def test_no_text_is_lost(answer: tuple[list[dict[str, Any]], str]) -> None:
    deltas, finish = answer
    stream = Stream(_HEAD)
    output = events(stream.feed(frames_of(deltas, finish)) + stream.end(2))[-1]["response"]["output"]
    parts = [part for item in output if item["type"] != "function_call" for part in item["content"]]
    for kind, field in (("output_text", "text"), ("reasoning_text", "text"), ("refusal", "refusal")):
        name = {"output_text": "content", "reasoning_text": "reasoning_content", "refusal": "refusal"}[kind]
        sent = "".join(part[field] for part in parts if part["type"] == kind)
        assert sent == "".join(delta.get(name) or "" for delta in deltas)
    calls = [item["arguments"] for item in output if item["type"] == "function_call"]
    pieces: dict[int, str] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            pieces[call["index"]] = pieces.get(call["index"], "") + call["function"]["arguments"]
    assert calls == [pieces[index] for index in sorted(pieces)]
