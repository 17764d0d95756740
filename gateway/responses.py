"""Small responses for the routes that are not hot; decides nothing."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from gateway.errors import GatewayError
from gateway.exchange import error_headers


def json_response(content: Any, status: int = 200) -> Response:
    """`content` as JSON."""
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


def error_response(error: GatewayError) -> Response:
    """`error` in the OpenAI envelope."""
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(
        orjson.dumps(error.body()), status_code=error.status, headers=headers, media_type="application/json"
    )
