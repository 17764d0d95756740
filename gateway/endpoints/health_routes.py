"""`/livez`, `/readyz`, `/health` and `/metrics`: without a key, and without waiting for another service.

The details of `/health` need a key.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from gateway.breaker.permits import BreakerState
from gateway.http.http_exchange import exchange_of, json_response
from gateway.runtime import Runtime
from gateway.telemetry.gateway_metrics import CONTENT_TYPE
from headgate.shared.openapi import NOT_NOW


def router(runtime: Runtime) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/livez")
    async def livez() -> Response:
        """200 as long as the process serves."""
        return json_response({"status": "ok"})

    @routes.get("/readyz", responses=NOT_NOW)
    async def readyz() -> Response:
        """200 while new requests are accepted, 503 just after the start and while the gateway stops."""
        if runtime.is_ready:
            return json_response({"status": "ok"})
        return json_response({"status": "draining" if runtime.is_draining else "starting"}, 503)

    @routes.get("/health", responses=NOT_NOW)
    async def health(request: Request) -> Response:
        """200 `ok` or `degraded`, 503 while stopping; with a use key also the details."""
        reachable = runtime.view.reachable
        opened = sorted(name for name, state in runtime.breakers.states().items() if state is not BreakerState.CLOSED)
        status = "draining" if runtime.is_draining else "degraded" if opened or reachable is False else "ok"
        code = 503 if runtime.is_draining else 200
        known = runtime.keys.identify(exchange_of(request.scope).head.headers)
        if known is None or "use" not in known[0].scopes:
            return json_response({"status": status}, code)
        body = {
            "status": status,
            "inference": {
                "url": runtime.config.inference.url,
                "reachable": reachable,
                "models": {name: str(model.state) for name, model in runtime.view.models.items()},
            },
            "breakers_not_closed": opened,
            "in_flight": runtime.admission.in_flight,
            "tasks": len(asyncio.all_tasks()),
        }
        return json_response(body, code)

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(runtime.telemetry.render(), headers={"content-type": CONTENT_TYPE})

    return routes
