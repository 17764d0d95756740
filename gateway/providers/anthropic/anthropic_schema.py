"""Writes a JSON schema as Anthropic holds answers to one, or says why it cannot; sends nothing.

It holds types, names, choices and closed objects. What it refuses beside them (bounds, lengths, patterns) becomes words
in the description, where the model reads it: Anthropic's own client does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from gateway.apis.lenient_json import dumps
from gateway.providers.provider_fields import unsupported

_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid")
_DEFINITIONS = ("$defs", "definitions")
_UNIONS = {"anyOf": "anyOf", "oneOf": "anyOf", "allOf": "allOf"}
_ABOUT = ("$schema", "$id", "$comment")
"""Keywords that ask nothing of an answer."""

_UNTYPED = "it needs a type for everything in a schema"
_NAMELESS = "it closes objects to the properties that they name, and one in the schema names none"
_JOINED = "it closes every object to its own properties, so that those which a schema joins would exclude each other"
_REFERENCES = "references in a schema must lead to its `$defs`, and none of them to itself"


def held(schema: Any, param: str) -> dict[str, Any]:
    """`schema` as Anthropic takes it; raises UpstreamError (400, `unsupported_parameter`) naming `param`."""
    said = _held(schema, param)
    _check_references(said, param)
    return said


def _held(schema: Any, param: str) -> dict[str, Any]:
    if not isinstance(schema, Mapping):
        raise unsupported(param, _UNTYPED)
    left = {name: value for name, value in schema.items() if name not in _ABOUT}
    said: dict[str, Any] = {}
    for name in _DEFINITIONS:
        if isinstance(left.get(name), Mapping):
            said[name] = {key: _held(inner, param) for key, inner in left.pop(name).items()}
    if isinstance(left.get("$ref"), str):
        reference = {"$ref": left.pop("$ref")}
        said |= {"anyOf": [reference]} if left else reference  # nothing may stand beside a reference itself
    else:
        said |= _shape(left, param)
    said |= {name: left.pop(name) for name in ("title", "description") if isinstance(left.get(name), str)}
    if left:
        told = ", ".join(f"{name}: {dumps(value).decode()}" for name, value in left.items())
        said["description"] = "\n\n".join((*([said["description"]] if said.get("description") else []), f"{{{told}}}"))
    return said


def _shape(left: dict[str, Any], param: str) -> dict[str, Any]:
    """What Anthropic enforces of a schema; takes it out of `left`."""
    if literals := _literals(left):
        left.pop("type", None)
        return literals
    said: dict[str, Any] = {}
    type_ = left.pop("type", None) or ("object" if "properties" in left else "array" if "items" in left else None)
    kinds = type_ if isinstance(type_, list) else [type_] if type_ else []
    union = next((name for name in _UNIONS if isinstance(left.get(name), list)), None)
    if union is not None:
        said[_UNIONS[union]] = variants = [_held(variant, param) for variant in left.pop(union)]
        if "properties" in left or (union == "allOf" and sum(map(_has_closed, variants)) > 1):
            raise unsupported(param, _JOINED)
    elif kinds:
        said["type"] = type_
    else:
        raise unsupported(param, _UNTYPED)
    if "object" in kinds and union is None:
        said |= _object(left, param)
    if "array" in kinds and "items" in left:
        said["items"] = _held(left.pop("items"), param)
    if "array" in kinds and left.get("minItems") in (0, 1):
        said["minItems"] = left.pop("minItems")
    if "string" in kinds and left.get("format") in _FORMATS:
        said["format"] = left.pop("format")
    return said


def _has_closed(schema: Mapping[str, Any]) -> bool:
    """Whether what `_held` wrote is an object, or may be one behind a reference."""
    variants = (*schema.get("anyOf", ()), *schema.get("allOf", ()))
    return "additionalProperties" in schema or "$ref" in schema or any(map(_has_closed, variants))


def _literals(left: dict[str, Any]) -> dict[str, Any]:
    """The values that a schema lists, where they are plain."""
    said: dict[str, Any] = {}
    if isinstance(left.get("enum"), list) and left["enum"] and all(map(_is_plain, left["enum"])):
        said["enum"] = left.pop("enum")
    if "const" in left and _is_plain(left["const"]):
        said["const"] = left.pop("const")
    return said


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _object(left: dict[str, Any], param: str) -> dict[str, Any]:
    """An object that is closed to what it does not name: an answer to the closed one is an answer to the open one."""
    named = left.pop("properties", None)
    properties = named if isinstance(named, Mapping) else {}
    is_open = left.pop("additionalProperties", properties is not named) is not False or "patternProperties" in left
    if is_open and not properties:
        raise unsupported(param, _NAMELESS)
    said = {"properties": {name: _held(inner, param) for name, inner in properties.items()}}
    return {**said, "additionalProperties": False} | ({"required": left.pop("required")} if "required" in left else {})


def _check_references(schema: Mapping[str, Any], param: str) -> None:
    """Raises UpstreamError where a reference leads out of the schema, or a definition contains itself."""
    uses = {
        f"#/{name}/{key}": set(_references(inner))
        for name in _DEFINITIONS
        for key, inner in schema.get(name, {}).items()
    }
    if not uses.keys() >= set(_references(schema)):
        raise unsupported(param, _REFERENCES)
    try:
        TopologicalSorter(uses).prepare()
    except CycleError:
        raise unsupported(param, _REFERENCES) from None


def _references(schema: Any) -> Iterator[str]:
    """Every reference in a schema that was written by `_held`."""
    if isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for inner in schema.values():
            yield from _references(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _references(inner)
