"""`GET` and `DELETE /v1/responses/{id}` and its input items, for the key that created the response."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.access.authentication import Key
from gateway.apis.lenient_json import dumps, loads
from gateway.apis.responses.responses_api import PATH, SHARED_STORE_DOWN
from gateway.apis.responses.responses_items import page
from gateway.apis.responses.responses_store import Store, StoredResponse
from gateway.apis.responses_body import INCLUDES
from gateway.errors import RequestError
from gateway.http.http_exchange import exchange_of, json_response
from gateway.runtime import Runtime
from inference.protocol import Code

if TYPE_CHECKING:
    from gateway.shared_state.shared_responses import SharedResponses

DEFAULT_LIMIT, MAX_LIMIT = 20, 100
"""Input items in one list; OpenAI's limits."""

_ORDERS = ("asc", "desc")


def _parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}


_PARAMETERS = [
    _parameter("limit", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT}),
    _parameter("order", {"type": "string", "enum": list(_ORDERS), "default": "desc"}),
    _parameter("after", {"type": "string"}),
    _parameter("include", {"type": "array", "items": {"type": "string", "enum": list(INCLUDES)}}),
]


def router(runtime: Runtime, store: Store, shared: SharedResponses | None = None) -> APIRouter:
    """The routes, and an error for `compact`; all need a use key. `shared` has the responses of other gateways."""
    routes = APIRouter()

    async def find(owner: str, response_id: str) -> StoredResponse:
        if shared is not None:
            await shared.fetch(owner, response_id)
        if (kept := store.get(owner, response_id, time.monotonic())) is None:
            raise _not_there(response_id, shared)
        return kept

    def admit(request: Request) -> Key:
        key, _ = runtime.keys.admit(exchange_of(request.scope).headers, "use")
        return key

    @routes.get(f"{PATH}/{{response_id}}")
    async def one_response(request: Request, response_id: str) -> Response:
        owner = admit(request).digest.hex()
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            message = "a stored response cannot be streamed; omit `stream`"
            raise RequestError(Code.UNSUPPORTED_PARAMETER, message, param="stream")
        kept = await find(owner, response_id)
        return Response(kept.response, media_type="application/json")

    @routes.get(f"{PATH}/{{response_id}}/input_items", openapi_extra={"parameters": _PARAMETERS})
    async def input_items(request: Request, response_id: str) -> Response:
        owner = admit(request).digest.hex()
        query = request.query_params
        limit, order = query.get("limit", str(DEFAULT_LIMIT)), query.get("order", "desc")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MAX_LIMIT):
            raise RequestError(
                Code.INVALID_REQUEST, f"`limit` must be a whole number from 1 to {MAX_LIMIT}", param="limit"
            )
        if order not in _ORDERS:
            raise RequestError(Code.INVALID_REQUEST, f"`order` must be one of {', '.join(_ORDERS)}", param="order")
        for wanted in (*query.getlist("include"), *query.getlist("include[]")):
            if wanted not in INCLUDES:
                message = f"`include` must contain only {', '.join(INCLUDES)}; it contains {wanted[:60]!r}"
                raise RequestError(Code.INVALID_REQUEST, message, param="include")
        kept = await find(owner, response_id)
        items = loads(kept.items)
        own, after = items[: len(items) - kept.outputs], query.get("after")
        try:
            found = page(own, limit=int(limit), after=after, oldest_first=order == "asc")
        except KeyError:
            message = (
                f"`after` names {after[:80]!r}, which is not an input item of this response"
                if after
                else "`after` is empty"
            )
            raise RequestError(Code.INVALID_REQUEST, message, param="after") from None
        return Response(dumps(found), media_type="application/json")

    @routes.post(f"{PATH}/compact")
    async def compact(request: Request) -> Response:
        """Without this route the path would match that of a response, and the error would be 405."""
        admit(request)
        raise RequestError(Code.NOT_FOUND, "compaction is not supported; send a conversation that fits the context")

    @routes.delete(f"{PATH}/{{response_id}}")
    async def forget_response(request: Request, response_id: str) -> Response:
        owner = admit(request).digest.hex()
        now = time.monotonic()
        if shared is None:
            is_deleted = store.delete(owner, response_id, now)
        else:
            is_deleted = await shared.forget(owner, response_id, now)
        if not is_deleted:
            raise _not_there(response_id, shared)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return routes


def _not_there(response_id: str, shared: SharedResponses | None) -> RequestError:
    message = f"Response with id '{response_id[:80]}' not found."
    if shared is not None and not shared.is_up:
        message = f"{message} {SHARED_STORE_DOWN}"
    return RequestError(Code.NOT_FOUND, message, param="response_id")
