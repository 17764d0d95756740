"""Classifies the chunks of an OpenAI stream, whose bytes are relayed unchanged (pure).

`step(state, frame) -> (state, frames)` for each server-sent event, then `end(state) -> frames` when the bytes end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.apis.lenient_json import dumps, loads
from gateway.apis.openai.frames import Comment, Data, DeltaKind, Done, Frame
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.openai.openai_calls import Numbers, number
from gateway.providers.provider_errors import error_in, frame_error
from headgate.shared.sse import SseFrame

DONE = b"[DONE]"
_CONTENT_FIELDS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call", "audio")


@dataclass(frozen=True, slots=True)
class OpenAIStream:
    """A stream so far. `choices` is the requested number; `opened` and `finished` are choice indices.

    `usage` is the last chunk with both choices and usage; it is not needed after a chunk with usage alone. `complete`:
    `[DONE]` was seen, and nothing more needs to be read.
    """

    choices: int = 1
    secrets: tuple[str, ...] = ()
    opened: frozenset[int] = frozenset()
    finished: frozenset[int] = frozenset()
    has_content: bool = False
    usage: Mapping[str, Any] | None = None
    usage_relayed: bool = False
    complete: bool = False
    calls: Mapping[int, Numbers] = field(default_factory=dict)
    """The tool calls of each choice."""


Step = tuple[OpenAIStream, tuple[Frame, ...]]


def step(state: OpenAIStream, frame: SseFrame) -> Step:
    """The frames that `frame` adds; raises UpstreamError for an error frame or an invalid chunk."""
    if frame.is_comment:
        return state, (Comment(frame.raw),)
    data = frame.data
    if data is None or state.complete:
        return state, ()
    if data.strip() == DONE:
        return replace(state, complete=True), ()
    chunk = _parsed(data)
    if error := error_in(chunk):
        raise frame_error(error, secrets=state.secrets)
    if not isinstance(chunk, dict) or not isinstance(choices := chunk.get("choices"), list):
        raise _malformed("a chunk without choices")
    if b"\n" in data:
        data = dumps(chunk)  # a chunk written over several `data:` lines leaves as one
    if not choices:
        relayed = isinstance(chunk.get("usage"), dict)
        kind = DeltaKind.USAGE if relayed else DeltaKind.OTHER
        return (replace(state, usage_relayed=True) if relayed else state), (Data(data, kind),)
    if isinstance(chunk.get("usage"), dict):
        state = replace(state, usage=chunk)
    if any(_pieces(choice) for choice in choices):
        state, changed = _numbered(state, choices)
        data = dumps(chunk) if changed else data
    return _read_choices(state, data, choices)


def _pieces(choice: Any) -> list[Any]:
    """The pieces of tool calls in a choice, if it has any."""
    delta = choice.get("delta") if isinstance(choice, dict) else None
    pieces = delta.get("tool_calls") if isinstance(delta, dict) else None
    return pieces if isinstance(pieces, list) else []


def _numbered(state: OpenAIStream, choices: list[Any]) -> tuple[OpenAIStream, bool]:
    """Gives every call its index (see `openai_calls`); the second value is whether one changed."""
    calls, changed = dict(state.calls), False
    for choice in choices:
        if pieces := _pieces(choice):
            at = _index(choice)
            calls[at], again = number(calls.get(at, Numbers()), pieces)
            changed |= again
    return replace(state, calls=calls), changed


def _parsed(data: bytes) -> Any:
    try:
        return loads(data)
    except ValueError:
        raise _malformed("a chunk that is not JSON") from None


def _read_choices(state: OpenAIStream, data: bytes, choices: list[Any]) -> Step:
    kind = DeltaKind.OTHER
    opened, finished, content = state.opened, state.finished, state.has_content
    for choice in choices:
        if not isinstance(choice, dict):
            raise _malformed("a choice that is not an object")
        index = _index(choice)
        if index not in opened:
            opened |= {index}
        if _has_content(choice):
            content = True
            if kind is DeltaKind.OTHER:
                kind = DeltaKind.CONTENT
        if choice.get("finish_reason") is not None:
            finished |= {index}
            kind = DeltaKind.FINISH
    if opened is not state.opened or finished is not state.finished or content is not state.has_content:
        state = replace(state, opened=opened, finished=finished, has_content=content)
    return state, (Data(data, kind),)


def _index(choice: Mapping[str, Any]) -> int:
    index = choice.get("index", 0)
    if not isinstance(index, int):
        raise _malformed("a choice whose index is not a number")
    return index


def _has_content(choice: Mapping[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(delta.get(name) for name in _CONTENT_FIELDS)


def end(state: OpenAIStream) -> tuple[Frame, ...]:
    """The last frames after the end of the bytes or `[DONE]`: a usage chunk if it is missing, and `Done`.

    Raises UpstreamError: READ if the stream was cut before its finish reason, EMPTY if it had no content. A choice that
    did not begin counts as cut, unless the provider sent `[DONE]`.
    """
    whole = bool(state.finished) and state.finished >= state.opened
    if not whole or not (state.complete or is_finished(state)):
        if state.has_content or state.finished:
            raise UpstreamError(UpstreamKind.READ, "the stream ended before its finish reason")
        raise UpstreamError(UpstreamKind.EMPTY, "the stream ended with no content and no finish reason")
    if state.usage is None or state.usage_relayed:
        return (Done(),)
    return Data(dumps({**state.usage, "choices": []}), DeltaKind.USAGE), Done()


def is_complete(state: OpenAIStream) -> bool:
    """Whether `[DONE]` was seen."""
    return state.complete


def is_finished(state: OpenAIStream) -> bool:
    """Whether every requested choice has its finish reason."""
    return state.finished >= state.opened and len(state.finished) >= state.choices


def _malformed(what: str) -> UpstreamError:
    return UpstreamError(UpstreamKind.MALFORMED, f"the provider sent {what}")
