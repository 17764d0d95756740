"""Checks a JSON schema for structured output as strictly as the real APIs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_ABOUT = frozenset(("title", "description", "default"))
_LISTED = frozenset(("enum", "const"))
_UNIONS = ("anyOf", "allOf")


# --- Anthropic --------------------------------------------------------------------------------------------------------
_ANTHROPIC: Mapping[str, frozenset[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "minItems")),
    "string": frozenset(("format", "pattern")),
    **dict.fromkeys(("integer", "number", "boolean", "null"), frozenset[str]()),
}
_ANTHROPIC_FORMATS = (
    "date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid",
)  # fmt: skip


def anthropic_problem(schema: Any) -> str | None:
    """Why Anthropic refuses structured output with `schema`; None if it does not."""
    return next(_anthropic(schema, schema, ()), None)


def _anthropic(schema: Any, root: Any, within: tuple[str, ...]) -> Iterator[str]:
    if not isinstance(schema, dict):
        yield "Input should be a valid dictionary"
        return
    for inner in (*_mapping(schema, "$defs").values(), *_mapping(schema, "definitions").values()):
        yield from _anthropic(inner, root, within)
    if "$ref" in schema:
        if set(schema) - {"$ref", "$defs", "definitions"}:
            yield "'$ref' cannot stand beside other properties"
        yield from _anthropic_reference(schema["$ref"], root, within)
        return
    type_ = schema.get("type")
    types = [type_] if isinstance(type_, str) else type_ or (["object"] if "properties" in schema else [])
    if not types and not {*_UNIONS, *_LISTED} & set(schema):
        yield "Schema must have a 'type', 'anyOf', 'allOf', 'enum' or 'const'"
    allowed = _ABOUT | _LISTED | {"type", *_UNIONS, "$defs", "definitions"}
    for name in set(schema) - allowed.union(*(_ANTHROPIC[kind] for kind in types)):
        yield f"For '{types[0] if types else 'any'}' type, property '{name}' is not supported"
    if "object" in types and "anyOf" not in schema and schema.get("additionalProperties") is not False:
        yield "For 'object' type, 'additionalProperties' must be explicitly set to false"
    if schema.get("minItems", 0) not in (0, 1):
        yield "For 'array' type, 'minItems' values other than 0 or 1 are not supported"
    if schema.get("format", "uuid") not in _ANTHROPIC_FORMATS:
        yield f"For 'string' type, format '{schema['format']}' is not supported"
    if any(isinstance(value, (dict, list)) for value in (*schema.get("enum", ()), schema.get("const"))):
        yield "Enum values must be strings, numbers, booleans or null"
    for inner in _below(schema):
        yield from _anthropic(inner, root, within)


def _anthropic_reference(ref: str, root: Any, within: tuple[str, ...]) -> Iterator[str]:
    head, _, name = ref.rpartition("/")
    target = _mapping(root, head.removeprefix("#/")).get(name)
    if ref in within:
        yield "Recursive schemas are not supported"
    elif target is None:
        yield f"'{ref}' cannot be resolved"
    else:
        yield from _anthropic(target, root, (*within, ref))


# --- OpenAI -----------------------------------------------------------------------------------------------------------
_OPENAI: Mapping[str, frozenset[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "minItems", "maxItems")),
    "string": frozenset(("format", "pattern")),
    **dict.fromkeys(
        ("integer", "number"),
        frozenset(("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}
_OPENAI_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")


def openai_problem(schema: Any) -> str | None:
    """Why OpenAI's strict mode refuses `schema`; None where it does not."""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return "schema must be a JSON Schema of 'type: \"object\"'"
    if "anyOf" in schema:
        return "schema must not have 'anyOf' at the top level"
    return next(_openai(schema, ()), None)


def _openai(schema: Any, at: tuple[str, ...]) -> Iterator[str]:
    if not isinstance(schema, dict) or not {"type", "anyOf", "$ref"} & set(schema):
        yield f"In context={at}, schema must have a 'type' key."
        return
    if "$ref" in schema and len(schema) > 1:
        yield f"In context={at}, $ref cannot have keywords {set(schema) - {'$ref'}}."
    type_ = schema.get("type")
    types = [type_] if isinstance(type_, str) else type_ or []
    allowed = frozenset(("type", "title", "description", "anyOf", "$ref", "$defs", "definitions")) | _LISTED
    if not at:
        allowed |= {"$schema"}  # OpenAI's client for Node sends it
    for name in set(schema) - allowed.union(*(_OPENAI[kind] for kind in types)):
        yield f"In context={at}, '{name}' is not permitted."
    if "object" in types:
        if schema.get("additionalProperties") is not False:
            yield f"In context={at}, 'additionalProperties' is required to be supplied and to be false."
        if missing := set(_mapping(schema, "properties")) - set(schema.get("required", ())):
            yield (
                f"In context={at}, 'required' is required to be supplied and to be an array including every key in "
                f"properties. Missing '{missing.pop()}'."
            )
        if extra := set(schema.get("required", ())) - set(_mapping(schema, "properties")):
            yield f"In context={at}, 'required' has the extra key '{extra.pop()}'."
    if schema.get("format", "uuid") not in _OPENAI_FORMATS:
        yield f"In context={at}, '{schema['format']}' is not a valid format."
    for name in ("$defs", "definitions"):
        for key, inner in _mapping(schema, name).items():
            yield from _openai(inner, (*at, name, key))
    for inner in _below(schema):
        yield from _openai(inner, (*at, "..."))


# --- both -------------------------------------------------------------------------------------------------------------
def _below(schema: Mapping[str, Any]) -> Iterator[Any]:
    yield from _mapping(schema, "properties").values()
    for name in _UNIONS:
        yield from schema.get(name, ())
    if "items" in schema:
        yield schema["items"]


def _mapping(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = holder.get(name)
    return value if isinstance(value, dict) else {}
