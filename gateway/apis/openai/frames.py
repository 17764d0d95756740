"""The endpoints, and the frames of one OpenAI stream, as every provider yields them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple


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


CHAT, COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS
"""Separate names for the hot path: in Python 3.11 the lookup of an enum member takes as long as ten names."""


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
"""Separate names for the hot path."""


class Data(NamedTuple):
    """One chunk: `payload` is the JSON bytes without `data: `. `chunk` is the parsed payload, None if not parsed;
    treat it as immutable.
    """

    payload: bytes
    kind: DeltaKind
    chunk: dict[str, Any] | None = None


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
