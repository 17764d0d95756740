"""HTTP routes of the service itself: liveness, readiness, health, metrics, events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

import headgate
from headgate.shared.openapi import NOT_NOW
from inference.authority.shell import Authority
from inference.authority.views import figures
from inference.authority.views.inference_metrics import Metrics


def router(authority: Authority, metrics: Metrics, is_draining: Callable[[], bool]) -> APIRouter:
    """The routes of the service."""
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
            "version": getattr(headgate, "__version__", None),
            "models": {model.id: str(model.state) for model in authority.state.models.values()},
        }
        return JSONResponse(found, 200 if found["healthy"] else 503)

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/events", response_class=StreamingResponse)
    async def events() -> StreamingResponse:
        headers: dict[str, Any] = {"cache-control": "no-cache"}
        return StreamingResponse(authority.bus.listen(), media_type="text/event-stream", headers=headers)

    return routes
