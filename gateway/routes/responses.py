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
    """Both methods, and no for `compact`; they need a use key."""
    routes = APIRouter()

    def asking(request: Request) -> Key:
        key, _ = runtime.keys.admit(exchange_of(request.scope).told.headers, "use")
        return key

    @routes.get(f"{PATH}/{{response_id}}")
    async def one_response(request: Request, response_id: str) -> Response:
        owner = asking(request).digest.hex()
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            said = "an answer that was given is not streamed again; leave `stream` out"
            raise RequestError(Code.UNSUPPORTED_PARAMETER, said, param="stream")
        kept = store.get(owner, response_id, time.monotonic())
        if kept is None:
            raise _not_there(response_id)
        return Response(kept.response, media_type="application/json")

    @routes.post(f"{PATH}/compact")
    async def compact(request: Request) -> Response:
        """Else the path would be taken for that of an answer, which has other methods."""
        asking(request)
        raise RequestError(Code.NOT_FOUND, "conversations are not compacted here; send the ones that fit, or shorter")

    @routes.delete(f"{PATH}/{{response_id}}")
    async def forget_response(request: Request, response_id: str) -> Response:
        owner = asking(request).digest.hex()
        if not store.delete(owner, response_id, time.monotonic()):
            raise _not_there(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return routes


def _not_there(response_id: str) -> RequestError:
    return RequestError(Code.NOT_FOUND, f"Response with id '{response_id[:80]}' not found.", param="response_id")
