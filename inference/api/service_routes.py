"""HTTP routes of the service itself: liveness, readiness, health, metrics, events, and its OpenAPI description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

import headgate
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
from headgate.shared.openapi import NOT_NOW
from inference.authority.shell import Authority
from inference.authority.views import figures
from inference.authority.views.inference_metrics import Metrics

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
"""The body schema of each path that is served without FastAPI."""

_PARTS = {name: part for _, parts in _SCHEMAS.values() for name, part in parts.items()}
_STREAMS = ("/v1/chat/completions", "/v1/completions")
KEYLESS_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics"})
"""Paths that need no token."""


def router(app: FastAPI, authority: Authority, metrics: Metrics, is_draining: Callable[[], bool]) -> APIRouter:
    """The routes of the service. `app` has all routes that FastAPI describes."""
    routes = APIRouter()

    @routes.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    @routes.get("/readyz", responses=NOT_NOW)
    async def readyz() -> JSONResponse:
        if is_draining():
            return JSONResponse({"status": "draining"}, 503, headers={"retry-after": "5"})
        if not authority.state.started:
            return JSONResponse({"status": "starting"}, 503, headers={"retry-after": "1"})
        return JSONResponse({"status": "ready"})

    @routes.get("/health", responses=NOT_NOW)
    async def health() -> JSONResponse:
        authority.observe()
        found = figures.health(authority.state, authority.now)
        found |= {
            "service": "inference",
            **authority.identity,
            "version": getattr(headgate, "__version__", None),
            "models": {model.id: str(model.state) for model in authority.state.models.values()},
        }
        return JSONResponse(found, 200 if found["healthy"] else 503)

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/events", response_class=StreamingResponse)
    async def events(figures: bool = False, kv: bool = False) -> StreamingResponse:
        headers: dict[str, Any] = {"cache-control": "no-cache"}
        stream = authority.bus.listen(figures=figures, kv=kv)
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    @routes.get(openapi.PATH, include_in_schema=False)
    async def describe() -> JSONResponse:
        return JSONResponse(description(app))

    return routes


def description(app: FastAPI) -> dict[str, Any]:
    """The complete description: the routes of `app` and the paths that are served without FastAPI."""
    return openapi.completed(app.openapi(), BODIES, KEYLESS_PATHS, _STREAMS, _PARTS)
