"""The generating paths of Ollama's API. The other modules of this package translate requests, answers and errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from gateway.apis.lenient_json import dumps, loads
from gateway.apis.ollama import ollama_answer, ollama_request
from gateway.apis.ollama.ollama_answer import AnswerContext, OllamaLines
from gateway.apis.ollama.ollama_body import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from gateway.apis.ollama.ollama_request import ParsedRequest
from gateway.apis.openai.generation_request import InferenceRequest
from gateway.errors import GatewayError
from headgate.shared.bodies.body_decoder import Body


class _Clock:
    def __init__(self) -> None:
        self._began = time.monotonic_ns()

    def now(self) -> str:
        return datetime.now(UTC).isoformat().replace("+00:00", "Z")

    def elapsed_nanoseconds(self) -> int:
        return time.monotonic_ns() - self._began


class _Path(NamedTuple):
    """How one path reads bodies and writes answers."""

    body: type[Body]
    parse: Callable[[bytes], ParsedRequest]
    text_fields: Callable[[str, str], dict[str, Any]]
    whole: Callable[[Mapping[str, Any], AnswerContext], dict[str, Any]]
    streams: bool


PATHS: Mapping[str, _Path] = {
    "/api/chat": _Path(
        OllamaChatRequest, ollama_request.parse_chat, ollama_answer.in_message, ollama_answer.whole, True
    ),
    "/api/generate": _Path(
        OllamaGenerateRequest, ollama_request.parse_generate, ollama_answer.in_response, ollama_answer.whole, True
    ),
    "/api/embed": _Path(
        OllamaEmbedRequest, ollama_request.parse_embed, ollama_answer.in_response, ollama_answer.embeddings, False
    ),
    "/api/embeddings": _Path(
        OllamaEmbeddingsRequest,
        ollama_request.parse_embeddings,
        ollama_answer.in_response,
        ollama_answer.single_embedding,
        False,
    ),
}


@dataclass(frozen=True, slots=True)
class _Request:
    path: _Path
    request: InferenceRequest
    only_loads: bool
    clock: _Clock = field(default_factory=_Clock)

    @property
    def _how(self) -> AnswerContext:
        return AnswerContext(self.request.model, self.clock, self.path.text_fields, self.only_loads)

    def with_request(self, request: InferenceRequest) -> _Request:
        return replace(self, request=request)

    def writer(self) -> OllamaLines:
        return OllamaLines(self._how)

    def whole(self, answer: dict[str, Any]) -> bytes:
        return dumps(self.path.whole(answer, self._how))

    def unary(self, answer: bytes) -> bytes:
        return self.whole(loads(answer))


@dataclass(frozen=True, slots=True)
class OllamaApi:
    """The API of one path of `PATHS`."""

    path: str

    def parse(self, raw: bytes, owner: str) -> _Request:
        """See `gateway.apis.public_api.PublicApi`."""
        path = PATHS[self.path]
        parsed = path.parse(raw)
        return _Request(path, parsed.request, parsed.only_loads)

    def error(self, error: GatewayError) -> dict[str, Any]:
        """See `gateway.apis.public_api.PublicApi`."""
        return ollama_answer.error_body(error)
