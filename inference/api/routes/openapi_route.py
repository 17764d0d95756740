"""`GET /openapi.json`: the OpenAPI description of the service, with the types that workers decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from headgate.shared import openapi
from headgate.shared.bodies.body_decoder import Body, json_schema
from headgate.shared.bodies.openai_bodies import (
    ChatBody,
    CompletionRequest,
    DetokenizeBody,
    EmbeddingRequest,
    RerankRequest,
    TokenizeBody,
)

_TYPES: Mapping[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/rerank": RerankRequest,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_SCHEMAS = {path: json_schema(type_, is_public=False) for path, type_ in _TYPES.items()}

BODIES: Mapping[str, Mapping[str, Any]] = {path: body for path, (body, _) in _SCHEMAS.items()}
"""The body of each hot path."""

_PARTS = {name: part for _, parts in _SCHEMAS.values() for name, part in parts.items()}
_STREAMS = ("/v1/chat/completions", "/v1/completions")


def add(app: FastAPI, open_paths: frozenset[str]) -> None:
    """Adds the route to `app`."""

    @app.get(openapi.PATH, include_in_schema=False)
    async def describe() -> JSONResponse:
        return JSONResponse(description(app, open_paths))


def description(app: FastAPI, open_paths: frozenset[str]) -> dict[str, Any]:
    """The complete description: the routes of `app` and the hot paths."""
    return openapi.completed(app.openapi(), BODIES, open_paths, _STREAMS, _PARTS)
