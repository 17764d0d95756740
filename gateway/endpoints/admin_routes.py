"""`/admin/*`: breakers, explain records, reload. All paths need an admin key."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.errors import RequestError
from gateway.http.http_exchange import exchange_of, json_response
from gateway.runtime import Runtime
from headgate.shared.errors import ConfigError, HeadgateError
from inference.protocol import Code


def router(runtime: Runtime) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/admin")

    def admit(request: Request) -> None:
        runtime.keys.admit(exchange_of(request.scope).head.headers, "admin")

    @routes.get("/breakers")
    async def breakers(request: Request) -> Response:
        admit(request)
        return json_response({"breakers": runtime.breakers.describe()})

    @routes.post("/breakers/{name:path}/reset")
    async def reset(request: Request, name: str) -> Response:
        admit(request)
        if not runtime.breakers.reset(name):
            known = ", ".join(sorted(runtime.breakers.states())) or "none yet"
            raise RequestError(Code.NOT_FOUND, f"unknown breaker {name[:100]!r}; known breakers: {known}", param="name")
        return json_response({"name": name, "state": "closed"})

    @routes.get("/requests/{request_id}")
    async def explain(request: Request, request_id: str) -> Response:
        admit(request)
        if (record := runtime.records.get(request_id)) is None:
            raise RequestError(
                Code.NOT_FOUND,
                f"no record of request {request_id[:128]!r}; only the last requests are kept",
                param="request_id",
            )
        return json_response(record.to_json())

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
