"""`GET` and `DELETE /v1/responses/{id}`: answers that are still kept, to the key that asked for them."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.auth import Key
from gateway.core.responses_store import Store
from gateway.dialects.responses import PATH
from gateway.errors import RequestError
from gateway.exchange import exchange_of
from gateway.responses import json_response
from gateway.runtime import Runtime
from inference.protocol import Code


def router(runtime: Runtime, store: Store) -> APIRouter:
    """Both methods; they need a use key."""
    routes = APIRouter()

    def asking(request: Request) -> Key:
        key, _ = runtime.keys.admit(exchange_of(request.scope).headers, "use")
        return key

    @routes.get(f"{PATH}/{{name}}")
    async def one_response(request: Request, name: str) -> Response:
        owner = asking(request).digest.hex()
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            said = "an answer that was given is not streamed again; leave `stream` out"
            raise RequestError(Code.UNSUPPORTED_PARAMETER, said, param="stream")
        kept = store.get(owner, name, time.monotonic())
        if kept is None:
            raise _not_there(name)
        return Response(kept.response, media_type="application/json")

    @routes.delete(f"{PATH}/{{name}}")
    async def forget_response(request: Request, name: str) -> Response:
        owner = asking(request).digest.hex()
        if not store.delete(owner, name, time.monotonic()):
            raise _not_there(name)
        return json_response({"id": name, "object": "response", "deleted": True})

    return routes


def _not_there(name: str) -> RequestError:
    return RequestError(Code.NOT_FOUND, f"Response with id '{name[:80]}' not found.", param="response_id")
