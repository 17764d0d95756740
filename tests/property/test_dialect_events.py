"""Translated streams of any shape, cut anywhere: text and order are kept, and only a finish reason completes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk

from gateway.apis.openai.frames import Data, DeltaKind, Done, Frame
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.anthropic.anthropic_events import EVENTS, AnthropicStream
from gateway.providers.openai.openai_events import OpenAIStream
from headgate.shared.sse import SseFrame, SseSplitter
from tests.rigs.fake_provider import anthropic_wire, openai_wire
from tests.rigs.fake_provider.answers import Answer, ToolUse
from tests.rigs.fake_provider.strict import strictly

pytestmark = pytest.mark.unmeasured

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ANSWERS = st.builds(
    Answer,
    text=TEXT,
    reasoning=TEXT,
    tools=st.lists(st.builds(ToolUse, st.sampled_from(["a", "b"]), st.dictionaries(TEXT, JSON, max_size=2)), max_size=3)
    .map(tuple),
    stop=st.sampled_from(["stop", "length", "tool_calls", "stop_sequence", "content_filter"]),
    cached_tokens=st.integers(0, 99),
)  # fmt: skip
CALL = {"model": "m", "stream_options": {"include_usage": True}}


def _run(reader: AnthropicStream | OpenAIStream, raw: bytes, pieces: list[int]) -> list[Frame]:
    """All frames of a stream fed in pieces of the given sizes, then ended."""
    splitter, at = SseSplitter(), 0
    frames: list[Frame] = []
    sizes = [*pieces, len(raw)]
    for size in sizes:
        for frame in splitter.feed(raw[at : at + size]):
            frames += reader.feed(frame)
        at += size
        if at >= len(raw):
            break
    return [*frames, *reader.end()]


def _chunks(frames: list[Frame]) -> list[dict[str, Any]]:
    return [json.loads(frame.payload) for frame in frames if isinstance(frame, Data)]


def _joined(frames: list[Frame], name: str) -> str:
    return "".join(choice["delta"].get(name) or "" for chunk in _chunks(frames) for choice in chunk["choices"])


@settings(max_examples=200, deadline=None)
@given(ANSWERS, st.lists(st.integers(1, 200), max_size=30))
def test_anthropic_answer_has_the_same_content_as_openai_chunks(answer: Answer, pieces: list[int]) -> None:
    raw = b"".join(frame for _, frame in anthropic_wire.stream(1, CALL, answer, 10))
    frames = _run(AnthropicStream(created=5), raw, pieces)
    assert frames == _run(AnthropicStream(created=5), raw, [])
    assert _joined(frames, "content") == answer.text
    assert _joined(frames, "reasoning_content") == answer.reasoning
    calls: dict[int, list[str]] = {}
    for chunk in _chunks(frames):
        if not answer.reasoning:
            strictly(ChatCompletionChunk, chunk)
        for choice in chunk["choices"]:
            for call in choice["delta"].get("tool_calls") or ():
                at = calls.setdefault(call["index"], ["", ""])
                at[0] += call["function"].get("name", "")
                at[1] += call["function"].get("arguments", "")
    assert [(name, json.loads(written)) for name, written in calls.values()] == [
        (tool.name, dict(tool.arguments)) for tool in answer.tools
    ]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in _chunks(frames)}) == 1
    assert _chunks(frames)[-1]["usage"]["prompt_tokens"] == 10 + answer.cached_tokens
    assert frames[-1] == Done()


@settings(max_examples=150, deadline=None)
@given(ANSWERS, st.lists(st.integers(1, 300), max_size=30))
def test_openai_answer_is_relayed_byte_for_byte(answer: Answer, pieces: list[int]) -> None:
    raw = b"".join(frame for _, frame in openai_wire.chat_stream(1, CALL, answer, 10))
    frames = _run(OpenAIStream(), raw, pieces)
    relayed = b"".join(b"data: " + frame.payload + b"\n\n" for frame in frames if isinstance(frame, Data))
    assert relayed + b"data: [DONE]\n\n" == raw
    assert frames[-1] == Done()


@settings(max_examples=200, deadline=None)
@given(ANSWERS, st.floats(0, 1), st.sampled_from(["anthropic", "openai"]))
def test_cut_stream_is_complete_only_after_its_finish_reason(answer: Answer, where: float, dialect: str) -> None:
    wire, reader = {
        "anthropic": (anthropic_wire.stream, AnthropicStream(created=5)),
        "openai": (openai_wire.chat_stream, OpenAIStream()),
    }[dialect]
    raw = b"".join(frame for _, frame in wire(1, CALL, answer, 10))  # type: ignore[operator]
    cut = raw[: int(len(raw) * where)]
    seen: list[Frame] = []
    for frame in SseSplitter().feed(cut):
        seen += reader.feed(frame)  # type: ignore[attr-defined]
    kinds = {frame.kind for frame in seen if isinstance(frame, Data)}
    try:
        last = reader.end()  # type: ignore[attr-defined]
    except UpstreamError as error:
        assert DeltaKind.FINISH not in kinds
        assert error.kind is (UpstreamKind.READ if DeltaKind.CONTENT in kinds else UpstreamKind.EMPTY)
    else:
        assert DeltaKind.FINISH in kinds
        assert last[-1] == Done()


EVENT = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from([*EVENTS, "odd"]) | JSON,
        "index": st.integers(0, 2) | JSON,
        "message": st.fixed_dictionaries({}, optional={"id": TEXT | JSON, "model": JSON, "usage": JSON}) | JSON,
        "delta": st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from(["text_delta", "thinking_delta", "input_json_delta", "odd"]) | JSON,
                "text": JSON, "thinking": JSON, "partial_json": JSON, "stop_reason": JSON, "stop_details": JSON,
                "content": JSON, "tool_calls": JSON,
            },
        ),
        "content_block": st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from(["text", "tool_use", "thinking", "odd"]) | JSON,
                "text": JSON, "id": JSON, "name": JSON, "input": JSON,
            },
        ),
        "usage": JSON,
        "error": JSON,
        "choices": JSON | st.lists(st.fixed_dictionaries({}, optional={"index": JSON, "delta": JSON, "text": JSON})),
    },
)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(st.lists(EVENT.map(lambda event: json.dumps(event).encode()) | st.binary(max_size=20), max_size=8))
def test_invalid_streams_raise_only_upstream_errors(datas: list[bytes]) -> None:
    begun = AnthropicStream(created=5)
    begun.feed(SseFrame(b'{"type":"message_start","message":{"id":"x"}}'))
    for reader in (AnthropicStream(created=5), begun, OpenAIStream()):
        try:
            for data in datas:
                frames = reader.feed(SseFrame(data))  # type: ignore[attr-defined]
                assert all(isinstance(frame, Data) for frame in frames) or data.find(b"ping") >= 0
            reader.end()  # type: ignore[attr-defined]
        except UpstreamError as error:
            assert error.message
