"""Builds the ASGI application of the gateway: routes, error handlers, middleware."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.apis.messages.messages_api import MessagesApi
from gateway.apis.ollama.ollama_api import PATHS, OllamaApi
from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.openai_api import OpenAIApi
from gateway.apis.public_api import PublicApi
from gateway.apis.responses.responses_api import KEPT_BYTES, KEPT_SECONDS, ResponsesApi
from gateway.apis.responses.responses_store import Store
from gateway.endpoints import (
    model_routes,
    ollama_routes,
    operator_routes,
    response_routes,
    token_count_routes,
)
from gateway.endpoints.serve import Generation
from gateway.endpoints.token_count_routes import CountTokens
from gateway.errors import GatewayError, RefusedError, RequestError
from gateway.http.http_exchange import error_response, exchange_of
from gateway.http.middleware import Edge
from gateway.runtime import Runtime
from gateway.ui import ui_routes
from gateway.ui.dashboard import Dashboard
from headgate.shared.asgi import App
from inference.protocol import Code

if TYPE_CHECKING:
    from gateway.shared_state.shared_responses import SharedResponses

STATELESS_APIS: tuple[PublicApi, ...] = (
    *(OpenAIApi(endpoint) for endpoint in Endpoint),
    *(OllamaApi(path) for path in PATHS),
)
"""The public APIs without state."""


def make_app(runtime: Runtime) -> Edge:
    """The application of `runtime`; its lifespan starts and stops the runtime."""
    dashboard, shared = Dashboard(runtime), _shared_responses(runtime)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        dashboard.start()
        try:
            await runtime.start()
            yield
        finally:
            dashboard.stop()
            await runtime.stop()
            if shared is not None:
                await shared.aclose()

    app = FastAPI(
        title="Headgate gateway", openapi_url=None, redirect_slashes=False, lifespan=lifespan,
        telemetry={"tracing": False},  # the gateway has spans of its own
    )  # fmt: skip
    store = Store(KEPT_BYTES, KEPT_SECONDS) if shared is None else shared

    def omit_hosted_tools() -> bool:
        return runtime.config.hosted_tools == "leave_out"

    responding = ResponsesApi(store, omit_hosted_tools, lambda: runtime.config.max_body, shared)
    messages = MessagesApi(omit_hosted_tools)
    apis = (*STATELESS_APIS, messages, responding)
    direct: dict[str, App] = {api.path: Generation(runtime, api.parse) for api in apis}
    direct[ui_routes.CHAT] = Generation(runtime, OpenAIApi(Endpoint.CHAT).parse, dashboard.admit)
    direct[token_count_routes.PATH] = CountTokens(runtime, messages.parse_counted)
    direct[token_count_routes.INPUT_TOKENS_PATH] = CountTokens(
        runtime, responding.parse, {"object": "response.input_tokens"}
    )
    for path, endpoint in direct.items():
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))  # for the 405 of other methods
    app.include_router(operator_routes.health_router(runtime))
    app.include_router(model_routes.router(runtime))
    app.include_router(ollama_routes.router(runtime))
    app.include_router(operator_routes.admin_router(runtime))
    app.include_router(response_routes.router(runtime, store, shared))
    app.include_router(operator_routes.openapi_router(runtime, app))
    app.include_router(ui_routes.router(runtime, dashboard))
    app.add_exception_handler(GatewayError, _on_error)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(Exception, _on_defect)
    errors = {api.path: api.error for api in apis}
    return Edge(app, direct, errors, runtime.config.host, lambda: runtime.config.cors.origins)


def _shared_responses(runtime: Runtime) -> SharedResponses | None:
    """The responses of all gateways that share their state."""
    if runtime.shared_state is None or runtime.config.state is None:
        return None
    from gateway.shared_state.shared_responses import SharedResponses

    return SharedResponses(runtime.shared_state, runtime.config.state, KEPT_BYTES, KEPT_SECONDS)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    exchange = exchange_of(request.scope)
    exchange.reason = str(error.code)
    return error_response(exchange, error)


async def _on_http(request: Request, error: Exception) -> Response:
    """Errors of the router, in the OpenAI envelope."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"][:200]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        refusal = RequestError(Code.METHOD_NOT_ALLOWED, f"{path} does not support {request.method}; use {allowed}")
    elif error.status_code == 404:
        refusal = RequestError(Code.NOT_FOUND, f"unknown path {path}; the API is below /v1")
    else:
        refusal = RequestError(Code.INVALID_REQUEST, str(error.detail))
    response = await _on_error(request, refusal)
    response.headers.update(error.headers or {})
    return response


async def _on_invalid(request: Request, error: Exception) -> Response:
    return await _on_error(request, RequestError(Code.INVALID_REQUEST, f"invalid path or query: {error}"))


async def _on_defect(request: Request, error: Exception) -> Response:
    """The response to a defect, with the request id; `Edge` logs it."""
    message = f"internal error; see the gateway's log for request {exchange_of(request.scope).request_id}"
    return await _on_error(request, RefusedError(Code.INTERNAL_ERROR, message))
