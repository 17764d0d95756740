"""`GET /v1/models` and `/v1/models/{id}`: configured routes and local models, for Anthropic's clients in their form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.apis.messages import messages_models
from gateway.errors import RequestError
from gateway.http.http_exchange import exchange_of, json_response
from gateway.runtime import Runtime
from inference.protocol import Code

VIEW_SECONDS = 1.0
"""Oldest snapshot for a list while the inference service answers."""


def router(runtime: Runtime) -> APIRouter:
    """The routes; both need a use key."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def list_models(request: Request) -> Response:
        exchange = exchange_of(request.scope)
        runtime.keys.admit(exchange.head.headers, "use")
        await runtime.view.ensure(VIEW_SECONDS)
        found = list(_models(runtime).values())
        return json_response(messages_models.listing(found) if exchange.head.is_messages else _listed(found))

    @routes.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> Response:
        exchange = exchange_of(request.scope)
        runtime.keys.admit(exchange.head.headers, "use")
        await runtime.view.ensure(VIEW_SECONDS)
        models = _models(runtime)
        found = models.get(name) or models.get(runtime.view.aliases.get(name, ""))
        if found is None:
            known = ", ".join(sorted(models)[:20]) or "none"
            raise RequestError(
                Code.MODEL_NOT_FOUND, f"unknown model {name[:100]!r}; known models: {known}", param="model"
            )
        return json_response(messages_models.entry(found) if exchange.head.is_messages else found)

    return routes


def _listed(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": found}


def _models(runtime: Runtime) -> dict[str, dict[str, Any]]:
    """All models by id: named routes first, then models of the inference service."""
    local = runtime.view.models
    found: dict[str, dict[str, Any]] = {}
    for name, route in runtime.config.routes.items():
        if name == "*":
            continue
        entry = {"id": name, "object": "model", "created": 0, "owned_by": "headgate"}
        found[name] = local[name].to_json() if name in local else entry
        found[name] = found[name] | {"chain": list(route.chain)}
    if "*" in runtime.config.routes:
        for name, status in local.items():
            found.setdefault(name, status.to_json())
    return found
