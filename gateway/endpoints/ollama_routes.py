"""Ollama's routes about models: `GET /api/tags`, `/api/ps`, `/api/version`, `POST /api/show`, and `GET /`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import PlainTextResponse, Response

from gateway.access.authentication import Key
from gateway.apis.ollama.ollama_request import plain_name
from gateway.breaker.outcome import LOCAL
from gateway.endpoints.model_routes import UNKNOWN_DATE, VIEW_SECONDS, models_of, unknown_model
from gateway.http.http_exchange import exchange_of, json_response
from gateway.runtime import Runtime
from inference.protocol import ModelState, ModelStatus

API_VERSION = "0.13.0"
"""The version of Ollama whose API the gateway follows. Some clients require a minimum."""

_LOADED = (ModelState.READY, ModelState.BUSY, ModelState.DRAINING)
_NEVER = "9999-12-31T23:59:59Z"
"""No model is unloaded at a fixed time."""

_CAPABILITIES: Mapping[str, str] = {
    "chat": "completion",
    "tools": "tools",
    "vision": "vision",
    "embeddings": "embedding",
}
"""Ollama's name for each capability of a local model."""


class ShowRequest(BaseModel):
    """The body of `/api/show`; `name` is the older form of `model`."""

    model_config = ConfigDict(extra="ignore")
    model: str = ""
    name: str = ""
    verbose: bool | None = None


def router(runtime: Runtime) -> APIRouter:
    """The routes; all but `/` need a use key."""
    routes = APIRouter()

    async def admit(request: Request) -> Key:
        key, _ = runtime.keys.admit(exchange_of(request.scope).headers, "use")
        await runtime.view.ensure(VIEW_SECONDS)
        return key

    @routes.get("/", response_class=PlainTextResponse)
    @routes.head("/", include_in_schema=False)
    async def is_running() -> Response:
        """The text by which clients recognize Ollama."""
        return PlainTextResponse("Ollama is running")

    @routes.get("/api/version")
    async def version(request: Request) -> Response:
        await admit(request)
        return json_response({"version": API_VERSION})

    @routes.get("/api/tags")
    async def tags(request: Request) -> Response:
        names = models_of(runtime, await admit(request))
        return json_response({"models": [_listed(name, _status(runtime, name)) for name in names]})

    @routes.get("/api/ps")
    async def loaded(request: Request) -> Response:
        key = await admit(request)
        found = [model for model in runtime.view.models.values() if model.state in _LOADED and key.may_use(model.id)]
        return json_response({"models": [_loaded(model) for model in found]})

    @routes.post("/api/show")
    async def show(request: Request, body: ShowRequest) -> Response:
        known = models_of(runtime, await admit(request))
        given = plain_name(body.model or body.name)
        name = given if given in known else runtime.view.aliases.get(given, "")
        if name not in known:
            raise unknown_model(given, known)
        return json_response(_shown(name, _status(runtime, name)))

    return routes


def _status(runtime: Runtime, name: str) -> ModelStatus | None:
    """The status of a local model, or of the first local candidate of a route."""
    models, route = runtime.view.models, runtime.config.routes.get(name)
    chain = [] if route is None else [entry.partition("/") for entry in route.chain]
    candidates = [name if model == "*" else model for provider, _, model in chain if provider == LOCAL]
    found = [models[one] for one in (runtime.view.aliases.get(one, one) for one in candidates) if one in models]
    return found[0] if found else models.get(name)


def _details(status: ModelStatus | None) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "" if status is None else "gguf",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _listed(name: str, status: ModelStatus | None) -> dict[str, Any]:
    size = None if status is None else status.actual_bytes or status.predicted_bytes
    return {
        "name": name,
        "model": name,
        "modified_at": UNKNOWN_DATE,
        "size": size or 0,
        "digest": "",
        "details": _details(status),
    }


def _loaded(status: ModelStatus) -> dict[str, Any]:
    entry = _listed(status.id, status)
    del entry["modified_at"]
    on_device = entry["size"] if any(device != "cpu" for device in status.devices) else 0
    return {**entry, "expires_at": _NEVER, "size_vram": on_device, "context_length": status.context_length}


def _shown(name: str, status: ModelStatus | None) -> dict[str, Any]:
    context = status.context_length if status is not None else 0
    facts = {"general.architecture": "headgate", "general.basename": name}
    capabilities = ("chat",) if status is None else status.capabilities
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(status),
        "model_info": {**facts, **({"headgate.context_length": context} if context else {})},
        "capabilities": [name for capability, name in _CAPABILITIES.items() if capability in capabilities],
        "modified_at": UNKNOWN_DATE,
    }
