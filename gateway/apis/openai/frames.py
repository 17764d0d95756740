"""Names the endpoints and the frames of one OpenAI stream, as every provider yields them; decides nothing."""

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
        """Whether its answers come as a stream; the others come whole."""
        return self not in (Endpoint.EMBEDDINGS, Endpoint.RERANK)


CHAT, COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS
"""Separate names for the hot path: in Python 3.11 the lookup of an enum member takes as long as ten names."""


class DeltaKind(StrEnum):
    """What a data frame carries, as far as commit and honest endings need to know."""

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
    """One chunk: `payload` is the JSON bytes without `data: `; `kind` was read from it once, by the provider. `chunk`
    is what the bytes say, where the provider has parsed them; it is not modified.
    """

    payload: bytes
    kind: DeltaKind
    chunk: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Comment:
    """An SSE comment, whole with its blank line, as it may be forwarded."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a complete answer."""


Frame = Data | Comment | Done


class Flavor(StrEnum):
    """Whose idea of OpenAI's dialect an address speaks."""

    OPENAI = "openai"
    GOOGLE = "google"
    COMPATIBLE = "compatible"
    """any other service that says it is compatible"""
