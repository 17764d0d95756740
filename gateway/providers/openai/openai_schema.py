"""Whether OpenAI's strict mode accepts a JSON schema.

In strict mode every object lists all its properties and requires all of them; an optional property is nullable. The
lists contain documented keywords only, so a doubtful schema counts as not strict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
_KEYWORDS = frozenset((
    "type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "enum", "const", "anyOf",
    "$ref", "$defs", "definitions", "title", "description", "pattern", "format", "multipleOf", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum",
))  # fmt: skip
_MEANINGS = ("type", "anyOf", "$ref")
"""Every schema has one of these."""
_HOLDERS: Mapping[str, type] = {"properties": dict, "$defs": dict, "definitions": dict, "anyOf": list, "required": list}


def is_strict(schema: Any) -> bool:
    """Whether strict mode accepts `schema`, the schema of an answer or of a function's parameters."""
    return isinstance(schema, dict) and schema.get("type") == "object" and "anyOf" not in schema and _is_taken(schema)


def _is_taken(schema: Any) -> bool:
    if not isinstance(schema, dict) or not schema.keys() <= _KEYWORDS or schema.keys().isdisjoint(_MEANINGS):
        return False
    if "$ref" in schema and len(schema) > 1:
        return False
    if not all(isinstance(schema[name], kind) for name, kind in _HOLDERS.items() if name in schema):
        return False
    type_ = schema.get("type", [])
    kinds = type_ if isinstance(type_, list) else [type_]
    if any(kind not in _TYPES for kind in kinds) or schema.get("format", "date") not in _FORMATS:
        return False
    if ("object" in kinds or "properties" in schema) and not _is_closed(schema):
        return False
    inner = [schema["items"]] if "items" in schema else []
    inner += schema.get("anyOf", ())
    for name in ("properties", "$defs", "definitions"):
        inner += schema.get(name, {}).values()
    return all(map(_is_taken, inner))


def _is_closed(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    is_whole = len(required) == len(properties) and all(name in required for name in properties)
    return schema.get("additionalProperties") is False and is_whole
