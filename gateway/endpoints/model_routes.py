"""`GET /v1/models` and `/v1/models/{id}`: routes and local models, for Anthropic's clients in their format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.access.authentication import Key
from gateway.errors import RequestError
from gateway.http.http_exchange import exchange_of, json_response
from gateway.runtime import Runtime
from headgate.shared.errors import did_you_mean
from inference.protocol import Code

VIEW_SECONDS = 1.0
"""Maximum age of the snapshot for a list, if the inference service answers."""


def router(runtime: Runtime) -> APIRouter:
    """The routes; both need a use key."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def list_models(request: Request) -> Response:
        exchange = exchange_of(request.scope)
        key, _ = runtime.keys.admit(exchange.headers, "use")
        await runtime.view.ensure(VIEW_SECONDS)
        found = list(models_of(runtime, key).values())
        return json_response(anthropic_list(found) if exchange.is_messages else {"object": "list", "data": found})

    @routes.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> Response:
        exchange = exchange_of(request.scope)
        key, _ = runtime.keys.admit(exchange.headers, "use")
        await runtime.view.ensure(VIEW_SECONDS)
        models = models_of(runtime, key)
        found = models.get(name) or models.get(runtime.view.aliases.get(name, ""))
        if found is None:
            raise unknown_model(name, models)
        return json_response(anthropic_entry(found) if exchange.is_messages else found)

    return routes


def unknown_model(name: str, known: Iterable[str]) -> RequestError:
    """The error for an unknown model, with a similar name when there is one."""
    names = sorted(known)
    advice = did_you_mean(name, names, f"known models: {', '.join(names[:20]) or 'none'}")
    return RequestError(Code.MODEL_NOT_FOUND, f"unknown model {name[:100]!r}{advice}", param="model")


def models_of(runtime: Runtime, key: Key) -> dict[str, dict[str, Any]]:
    """The models that `key` may use, by id: named routes, then, if there is a route `*`, all local models."""
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
    return {name: entry for name, entry in found.items() if key.may_use(name)}


UNKNOWN_DATE = "1970-01-01T00:00:00Z"
"""The value of Anthropic's API for an unknown release date."""


def anthropic_list(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All of `models` (entries of OpenAI's listing) in Anthropic's format, on one page."""
    found = [anthropic_entry(model) for model in models]
    ends = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    return {"data": found, "has_more": False, "first_id": ends[0], "last_id": ends[1]}


def anthropic_entry(model: Mapping[str, Any]) -> dict[str, Any]:
    """One model in Anthropic's format, with its context length if it is known."""
    context = (model.get("headgate") or {}).get("context_length") or None
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": UNKNOWN_DATE,
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }
