"""Routes of the gateway itself: health, metrics, administration, and the OpenAPI document."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from gateway.apis.messages import messages_errors
from gateway.apis.messages.messages_api import MessagesApi
from gateway.apis.messages_body import CountedRequest, MessagesRequest
from gateway.apis.ollama import ollama_answer
from gateway.apis.ollama.ollama_answer import OllamaLines
from gateway.apis.ollama.ollama_api import PATHS as OLLAMA_PATHS
from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import BODIES
from gateway.apis.responses import responses_api
from gateway.apis.responses_body import responses_schema
from gateway.breaker.permits import BreakerState
from gateway.endpoints import token_count_routes
from gateway.errors import RequestError
from gateway.http.http_exchange import exchange_of, json_response
from gateway.nodes.node import Node
from gateway.routing.explain_record import KEPT
from gateway.runtime import Runtime
from gateway.telemetry.gateway_metrics import CONTENT_TYPE
from gateway.usage.prices import LIST_PRICES_DATE
from gateway.usage.usage_query import usage_query
from headgate.shared import openapi
from headgate.shared.bodies.body_decoder import json_schema
from headgate.shared.errors import ConfigError, HeadgateError
from headgate.shared.openapi import NOT_NOW
from inference.protocol import Code, ModelState


def health_router(runtime: Runtime) -> APIRouter:
    """`/livez`, `/readyz`, `/health` and `/metrics`: without a key, and without waiting for another service.

    The details of `/health` need a key.
    """
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
        known = runtime.keys.identify(exchange_of(request.scope).headers)
        if known is None or "use" not in known[0].scopes:
            return json_response({"status": status}, code)
        body = {
            "status": status,
            "inference": {
                "url": runtime.config.inference.url,
                "nodes": {node.name: node.view.reachable for node in runtime.fleet.nodes.values() if node.name},
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
        runtime.telemetry.set_breakers(runtime.breakers.states_by_key())  # the end of an open period is no event
        return Response(runtime.telemetry.render(), headers={"content-type": CONTENT_TYPE})

    return routes


def admin_router(runtime: Runtime) -> APIRouter:
    """`/admin/*`: breakers, nodes, explain records, stored bodies, usage, reload. All paths need an admin key."""
    routes = APIRouter(prefix="/admin")

    def admit(request: Request) -> None:
        runtime.keys.admit(exchange_of(request.scope).headers, "admin")

    @routes.get("/breakers")
    async def breakers(request: Request) -> Response:
        admit(request)
        return json_response({"breakers": runtime.breakers.describe()})

    @routes.post("/breakers/{name:path}/reset")
    async def reset(request: Request, name: str) -> Response:
        admit(request)
        return json_response(reset_breaker(runtime, name))

    @routes.get("/nodes")
    async def nodes(request: Request) -> Response:
        """The inference services that this gateway knows, and what they do."""
        admit(request)
        sources = runtime.config.inference.nodes
        return json_response({"sources": sources, "nodes": [_node(node) for node in runtime.fleet.nodes.values()]})

    @routes.get("/requests/{request_id}")
    async def explain(request: Request, request_id: str) -> Response:
        admit(request)
        if (record := runtime.records.get(request_id)) is None:
            raise RequestError(
                Code.NOT_FOUND,
                f"no record of request {request_id[:128]!r}; only the last {KEPT} requests are kept",
                param="request_id",
            )
        return json_response(record.to_json())

    @routes.get("/captures/{request_id}")
    async def captured(request: Request, request_id: str) -> Response:
        """The bodies of a request on a route with `capture: true`."""
        admit(request)
        return json_response((await runtime.usage.captured(request_id))._asdict())

    @routes.get("/usage")
    async def usage(request: Request, by: str = "model", since: str = "", until: str = "") -> Response:
        """What requests used, grouped `by` key, model, day, route, tier or outcome."""
        admit(request)
        return json_response(await sums(runtime, by, since, until))

    @routes.post("/reload")
    async def reload(request: Request) -> Response:
        admit(request)
        try:
            return json_response(await runtime.reload())
        except ConfigError as error:
            problems = [str(problem) for problem in error.problems]
            raise RequestError(
                Code.INVALID_REQUEST,
                f"the configuration was not applied and the old one stays in force: {'; '.join(problems)}",
                details={"problems": problems},
            ) from error
        except HeadgateError as error:
            raise RequestError(Code.INVALID_REQUEST, f"the old configuration stays in force: {error}") from error

    return routes


_LOADED = (ModelState.READY, ModelState.BUSY)


def _node(node: Node) -> dict[str, Any]:
    models = node.view.models
    return {
        "name": node.name,
        "url": node.url,
        "listed": node.is_listed,
        "reachable": node.view.reachable,
        "since": round(node.view.reachable_since, 3),
        "epoch": node.epoch,
        "models": len(models),
        "loaded": sorted(name for name, status in models.items() if status.state in _LOADED),
        "in_flight": sum(status.in_flight for status in models.values()),
    }


def reset_breaker(runtime: Runtime, name: str) -> dict[str, str]:
    """Closes a breaker; returns its state. Raises RequestError for an unknown one."""
    if not runtime.breakers.reset(name):
        known = ", ".join(sorted(runtime.breakers.states())) or "none yet"
        raise RequestError(Code.NOT_FOUND, f"unknown breaker {name[:100]!r}; known breakers: {known}", param="name")
    return {"name": name, "state": "closed"}


async def sums(runtime: Runtime, by: str, since: str, until: str) -> dict[str, Any]:
    """Usage in groups; raises RequestError for an invalid query."""
    try:
        query = usage_query(by, since, until, time.time())
    except ValueError as error:
        raise RequestError(Code.INVALID_REQUEST, str(error)) from error
    return {"by": query.by, "prices_of": LIST_PRICES_DATE, "rows": await runtime.usage.sums(*query)}


KEYLESS_PATHS = ("/", "/livez", "/readyz", "/health", "/metrics")
"""Paths that need no key."""


def openapi_router(runtime: Runtime, app: FastAPI) -> APIRouter:
    """`GET /openapi.json`: the document with the schemas that the gateway validates against. It needs a use key."""
    routes = APIRouter()

    @routes.get(openapi.PATH, include_in_schema=False)
    async def describe(request: Request) -> Response:
        runtime.keys.admit(exchange_of(request.scope).headers, "use")
        return json_response(description(app))

    return routes


def description(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document for the FastAPI routes of `app` and the generation paths."""
    bodies: dict[str, Mapping[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for endpoint in Endpoint:
        bodies[f"/v1/{endpoint}"], parts = json_schema(BODIES[endpoint][0])
        schemas |= parts
    bodies[responses_api.PATH], parts = responses_schema()
    bodies[token_count_routes.INPUT_TOKENS_PATH] = bodies[responses_api.PATH]
    schemas |= parts
    for path, body in ((MessagesApi.path, MessagesRequest), (token_count_routes.PATH, CountedRequest)):
        bodies[path], parts = json_schema(body)
        schemas |= parts
    for path, ollama in OLLAMA_PATHS.items():
        bodies[path], parts = json_schema(ollama.body)
        schemas |= parts
    streams = [f"/v1/{endpoint}" for endpoint in Endpoint if endpoint.streams]
    streams += [responses_api.PATH, MessagesApi.path]
    found = openapi.completed(app.openapi(), bodies, KEYLESS_PATHS, streams, schemas)
    found["components"]["schemas"]["MessagesError"] = messages_errors.ENVELOPE
    for path in (MessagesApi.path, token_count_routes.PATH):
        found["paths"][path]["post"]["responses"]["default"]["content"] = {
            "application/json": {"schema": {"$ref": "#/components/schemas/MessagesError"}}
        }
    found["components"]["schemas"]["OllamaError"] = ollama_answer.ERROR
    for path in [path for path in found["paths"] if path.startswith("/api/")]:
        for operation in found["paths"][path].values():
            operation["responses"]["default"]["content"] = {
                "application/json": {"schema": {"$ref": "#/components/schemas/OllamaError"}}
            }
        if path in OLLAMA_PATHS and OLLAMA_PATHS[path].streams:
            content = found["paths"][path]["post"]["responses"]["200"]["content"]
            content[OllamaLines.media_type.decode()] = {}
    return found
