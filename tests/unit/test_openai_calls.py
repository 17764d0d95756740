"""Tool calls keep apart, however a provider numbers them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.apis.openai.assemble import Assembly
from gateway.apis.openai.frames import Data, Frame
from gateway.errors import UpstreamError
from gateway.providers.openai import openai_events
from gateway.providers.openai.openai_calls import Numbers, number
from headgate.shared.sse import SseSplitter


def indices(*pieces: dict[str, Any]) -> list[int]:
    """The indices of pieces that come one after the other."""
    numbers = Numbers()
    for piece in pieces:
        numbers, _ = number(numbers, [piece])
    return [piece["index"] for piece in pieces]


def piece(index: int | None = None, id: str | None = None, name: str | None = None) -> dict[str, Any]:
    said: dict[str, Any] = {"function": {"name": name, "arguments": "x"}}
    return {**({} if index is None else {"index": index}), **({} if id is None else {"id": id}), **said}


def test_what_openai_numbers_stays() -> None:
    numbers, changed = number(Numbers(), [piece(0, "a", "f"), piece(0), piece(1, "b", "g"), piece(1), piece(0)])
    assert (changed, numbers.ids) == (False, {0: "a", 1: "b"})
    assert indices(piece(1, "a", "f"), piece(1), piece(2, "b")) == [1, 1, 2]


def test_calls_without_an_index_get_one_each() -> None:
    assert indices(piece(None, "a", "f"), piece(None), piece(None, "b", "g"), piece(), piece(None, "a")) == [
        0,
        0,
        1,
        1,
        0,
    ]
    assert indices(piece(None, None, "f"), piece(), piece(None, None, "g")) == [0, 0, 1]


def test_calls_that_share_an_index_are_kept_apart() -> None:
    assert indices(piece(0, "a", "f"), piece(0, "b", "g"), piece(0), piece(0, "c", "h")) == [0, 1, 1, 2]


def test_an_id_that_comes_late_belongs_to_the_call_that_has_none() -> None:
    assert indices(piece(0, None, "f"), piece(0, "a"), piece(0), piece(0, "b", "g")) == [0, 0, 0, 1]


def test_what_is_no_piece_is_left_alone() -> None:
    pieces: list[Any] = ["x", {"index": "y", "function": 5}]
    assert number(Numbers(), pieces)[1]
    assert pieces == ["x", {"index": 0, "function": 5}]


def test_a_choice_whose_index_is_none_is_malformed_also_with_calls() -> None:
    choice = {"index": ["x"], "delta": {"tool_calls": [piece(0, "a", "f")]}}
    raw = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    with pytest.raises(UpstreamError, match="no number"):
        openai_events.step(openai_events.State(1), SseSplitter().feed(raw)[0])


def test_parallel_calls_of_googles_address_come_out_as_two() -> None:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 5, "model": "gemini"}
    deltas: list[Any] = [
        {"role": "assistant", "content": "I look."},
        {"tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}]},
        {"tool_calls": [{"id": "b", "type": "function", "function": {"name": "f", "arguments": '{"x":2}'}}]},
        {"tool_calls": None},
        None,
    ]
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks[1]["choices"].append({"index": 1, "delta": {"content": "Me too."}, "finish_reason": "stop"})
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    raw = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
    state = openai_events.State(2)
    frames: list[Frame] = []
    for frame in SseSplitter().feed(raw):
        state, said = openai_events.step(state, frame)
        frames += said
    assembly = Assembly()
    for one in frames:
        if isinstance(one, Data):
            assembly.add(json.loads(one.payload))
    calls = assembly.result()["choices"][0]["message"]["tool_calls"]
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [("a", '{"x":1}'), ("b", '{"x":2}')]
