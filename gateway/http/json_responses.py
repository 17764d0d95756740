"""JSON responses for routes that do not generate."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from gateway.errors import GatewayError
from gateway.http.http_exchange import Exchange, error_headers


def json_response(content: Any, status: int = 200) -> Response:
    """`content` as JSON."""
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


def error_response(exchange: Exchange, error: GatewayError) -> Response:
    """`error` in the envelope of the path."""
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    body = orjson.dumps(exchange.envelope(error))
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")
