"""Completes the OpenAPI description of a service: paths that FastAPI does not serve, the error envelope, the key.

FastAPI describes its own routes. This module adds the paths that are served without FastAPI, the common form of all
errors, and the required API key. It removes FastAPI's status 422: invalid requests get status 400.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

PATH = "/openapi.json"

ERROR: Mapping[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
                "headgate": {"type": "object"},
            },
        }
    },
}
"""The envelope of every error."""

NOT_NOW: dict[int | str, dict[str, Any]] = {
    503: {
        "description": "not healthy or not ready; the same fields give the reason",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}
"""The response of a health check that fails: the same fields as with status 200."""

_FASTAPIS_OWN = ("HTTPValidationError", "ValidationError")
_JSON = "application/json"


def completed(
    described: Mapping[str, Any],
    bodies: Mapping[str, Mapping[str, Any]],
    keyless_paths: Collection[str],
    streams: Collection[str] = (),
    parts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A completed copy of FastAPI's document `described`.

    `bodies` has the paths (POST) that FastAPI does not serve, with the JSON schemas of their bodies; those in `streams`
    also answer with server-sent events. `parts` are the schemas that the bodies refer to, by name. `keyless_paths` need
    no key.
    """
    found = copy.deepcopy(dict(described))
    paths = found.setdefault("paths", {})
    for path, body in bodies.items():
        paths[path] = {"post": _operation(path, body, is_stream=path in streams)}
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    schemas |= parts or {}
    for name in _FASTAPIS_OWN:
        schemas.pop(name, None)
    schemas["Error"] = ERROR
    found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, methods in paths.items():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {
                "description": "an error",
                "content": {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
            }
            if path not in keyless_paths:
                operation["security"] = [{"key": []}]
    return found


def _operation(path: str, body: Mapping[str, Any], *, is_stream: bool) -> dict[str, Any]:
    content: dict[str, Any] = {_JSON: {"schema": {"type": "object"}}}
    if is_stream:
        content["text/event-stream"] = {}
    return {
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {"required": True, "content": {_JSON: {"schema": body}}},
        "responses": {"200": {"description": "the answer", "content": content}},
    }
