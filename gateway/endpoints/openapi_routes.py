"""`GET /openapi.json`: the OpenAPI document, with the schemas that the gateway validates against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from gateway.apis.messages import messages_errors
from gateway.apis.messages.messages_api import MessagesDialect
from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import BODIES
from gateway.apis.responses import responses_api
from gateway.apis.schema.messages_body import CountedRequest, MessagesRequest
from gateway.apis.schema.responses_body import responses_schema
from gateway.endpoints import token_count_routes
from gateway.http.http_exchange import exchange_of, json_response
from gateway.runtime import Runtime
from headgate.shared import openapi
from headgate.shared.bodies.body_decoder import json_schema

OPEN_PATHS = ("/livez", "/readyz", "/health", "/metrics")


def router(runtime: Runtime, app: FastAPI) -> APIRouter:
    """The route; it needs a use key."""
    routes = APIRouter()

    @routes.get(openapi.PATH, include_in_schema=False)
    async def describe(request: Request) -> Response:
        runtime.keys.admit(exchange_of(request.scope).head.headers, "use")
        return json_response(description(app))

    return routes


def description(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document for the FastAPI routes of `app` and the generation paths."""
    hot: dict[str, Mapping[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for endpoint in Endpoint:
        hot[f"/v1/{endpoint}"], parts = json_schema(BODIES[endpoint][0])
        schemas |= parts
    hot[responses_api.PATH], parts = responses_schema()
    hot[token_count_routes.INPUT_TOKENS_PATH] = hot[responses_api.PATH]
    schemas |= parts
    for path, body in ((MessagesDialect.path, MessagesRequest), (token_count_routes.PATH, CountedRequest)):
        hot[path], parts = json_schema(body)
        schemas |= parts
    streams = [f"/v1/{endpoint}" for endpoint in Endpoint if endpoint.streams]
    streams += [responses_api.PATH, MessagesDialect.path]
    found = openapi.completed(app.openapi(), hot, OPEN_PATHS, streams, schemas)
    found["components"]["schemas"]["MessagesError"] = messages_errors.ENVELOPE
    for path in (MessagesDialect.path, token_count_routes.PATH):
        found["paths"][path]["post"]["responses"]["default"]["content"] = {
            "application/json": {"schema": {"$ref": "#/components/schemas/MessagesError"}}
        }
    return found
