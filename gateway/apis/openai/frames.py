"""The endpoints, and the frames of one OpenAI stream, as every provider yields them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from gateway.apis.lenient_json import loads, objects

EVENT_STREAM = b"text/event-stream; charset=utf-8"
"""The media type of server-sent events."""


class Endpoint(StrEnum):
    """An endpoint; the value is the path below `/v1/`."""

    CHAT = "chat/completions"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"

    @functools.cached_property
    def streams(self) -> bool:
        """Whether answers of the endpoint can be streamed."""
        return self not in (Endpoint.EMBEDDINGS, Endpoint.RERANK)


class DeltaKind(StrEnum):
    """The kind of a data frame."""

    CONTENT = "content"
    """text, reasoning, refusal or tool-call delta: the answer has begun"""
    FINISH = "finish"
    """a finish_reason (content may come with it)"""
    USAGE = "usage"
    """the usage chunk: `choices` is empty"""
    OTHER = "other"
    """role only, empty delta"""


CONTENT, FINISH, USAGE, OTHER = DeltaKind
"""Separate names for the hot path: in Python 3.11 looking up an enum member takes as long as looking up ten names."""


class Data(NamedTuple):
    """One chunk: `payload` is the JSON bytes without `data: `. `chunk` is the parsed payload, None if not parsed;
    treat it as immutable.
    """

    payload: bytes
    kind: DeltaKind
    chunk: dict[str, Any] | None = None

    def parsed(self) -> Any:
        """The chunk; raises ValueError when the payload is not JSON."""
        return loads(self.payload) if self.chunk is None else self.chunk


@dataclass(frozen=True, slots=True)
class Comment:
    """An SSE comment with its blank line."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a complete answer."""


Frame = Data | Comment | Done


class Flavor(StrEnum):
    """The variant of OpenAI's API that a provider implements."""

    OPENAI = "openai"
    GOOGLE = "google"
    COMPATIBLE = "compatible"
    """any other OpenAI-compatible service"""


_CONTENT_FIELDS = frozenset(
    ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call", "audio")
)


def frame_of(payload: bytes) -> Data:
    """The frame for `payload`, which has the braces of a JSON object; parsed if it has a list of `choices`."""
    try:
        chunk = loads(payload)
    except ValueError:
        return Data(payload, OTHER)
    choices = chunk.get("choices")
    return Data(payload, kind_of(choices), chunk) if isinstance(choices, list) else Data(payload, OTHER)


def kind_of(choices: Sequence[Any]) -> DeltaKind:
    """The kind of a chunk with these choices."""
    if not choices:
        return USAGE
    kind = OTHER
    for choice in choices:
        if isinstance(choice, dict):
            if choice.get("finish_reason") is not None:
                return FINISH
            if kind is OTHER and has_content(choice):
                kind = CONTENT
    return kind


def has_content(choice: Mapping[str, Any]) -> bool:
    """Whether a choice has a part of the answer."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        for name, value in delta.items():
            if value and name in _CONTENT_FIELDS:
                return True
    return bool(choice.get("text"))


class Finishes:
    """Counts which choices of one answer have their finish reason."""

    __slots__ = ("_choices", "_finished")

    def __init__(self, choices: int = 1) -> None:
        self._choices = choices
        self._finished: set[int] = set()

    def note(self, frame: Data) -> None:
        """Adds a chunk with a finish reason."""
        if self._choices == 1:
            self._finished.add(0)
            return
        with suppress(ValueError):  # invalid JSON has no finish reason
            for choice in objects(frame.parsed(), "choices"):
                if choice.get("finish_reason") is not None and isinstance(index := choice.get("index", 0), int):
                    self._finished.add(index)

    @property
    def are_any(self) -> bool:
        """Whether a choice has its finish reason."""
        return bool(self._finished)

    @property
    def are_all(self) -> bool:
        """Whether every choice has its finish reason."""
        return len(self._finished) >= self._choices
