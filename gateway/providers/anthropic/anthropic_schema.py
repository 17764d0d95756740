"""Translates a JSON schema into the subset that Anthropic enforces, or raises the reason why it cannot.

Types, properties, enumerations and closed objects are enforced. Other keywords (bounds, lengths, patterns) are moved
into the description for the model, as Anthropic's own client does.
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
"""Keywords that do not constrain an answer."""

_UNTYPED = "every part of a schema needs a type"
_NAMELESS = "objects accept only listed properties, and an object in the schema lists none"
_JOINED = (
    "it cannot combine objects in `allOf`, or properties beside `anyOf`, `oneOf` or `allOf`; list all properties in "
    "one object"
)
_REFERENCES = "references in a schema must point to its `$defs`, without cycles"


def to_anthropic_schema(schema: Any, param: str) -> dict[str, Any]:
    """`schema` as Anthropic accepts it; raises UpstreamError (400, `unsupported_parameter`) naming `param`."""
    written = _supported_schema(schema, param)
    _check_references(written, param)
    return written


def _supported_schema(schema: Any, param: str) -> dict[str, Any]:
    if not isinstance(schema, Mapping):
        raise unsupported(param, _UNTYPED)
    left = {name: value for name, value in schema.items() if name not in _ABOUT}
    written: dict[str, Any] = {}
    for name in _DEFINITIONS:
        if isinstance(left.get(name), Mapping):
            written[name] = {key: _supported_schema(inner, param) for key, inner in left.pop(name).items()}
    if isinstance(left.get("$ref"), str):
        reference = {"$ref": left.pop("$ref")}
        written |= {"anyOf": [reference]} if left else reference  # `$ref` must be the only key of its object
    else:
        written |= _shape(left, param)
    written |= {name: left.pop(name) for name in ("title", "description") if isinstance(left.get(name), str)}
    if left:
        unenforced = ", ".join(f"{name}: {dumps(value).decode()}" for name, value in left.items())
        written["description"] = "\n\n".join(
            (*([written["description"]] if written.get("description") else []), f"{{{unenforced}}}")
        )
    return written


def _shape(left: dict[str, Any], param: str) -> dict[str, Any]:
    """The part of a schema that Anthropic enforces; removes it from `left`."""
    if literals := _literals(left):
        left.pop("type", None)
        return literals
    written: dict[str, Any] = {}
    type_ = left.pop("type", None) or ("object" if "properties" in left else "array" if "items" in left else None)
    kinds = type_ if isinstance(type_, list) else [type_] if type_ else []
    union = next((name for name in _UNIONS if isinstance(left.get(name), list)), None)
    if union is not None:
        written[_UNIONS[union]] = variants = [_supported_schema(variant, param) for variant in left.pop(union)]
        if "properties" in left or (union == "allOf" and sum(map(_has_closed, variants)) > 1):
            raise unsupported(param, _JOINED)
    elif kinds:
        written["type"] = type_
    else:
        raise unsupported(param, _UNTYPED)
    if "object" in kinds and union is None:
        written |= _object(left, param)
    if "array" in kinds and "items" in left:
        written["items"] = _supported_schema(left.pop("items"), param)
    if "array" in kinds and left.get("minItems") in (0, 1):
        written["minItems"] = left.pop("minItems")
    if "string" in kinds and left.get("format") in _FORMATS:
        written["format"] = left.pop("format")
    return written


def _has_closed(schema: Mapping[str, Any]) -> bool:
    """Whether a translated schema is an object, or may be one behind a reference."""
    variants = (*schema.get("anyOf", ()), *schema.get("allOf", ()))
    return "additionalProperties" in schema or "$ref" in schema or any(map(_has_closed, variants))


def _literals(left: dict[str, Any]) -> dict[str, Any]:
    """`enum` and `const`, where their values are scalars; removes them from `left`."""
    written: dict[str, Any] = {}
    if isinstance(left.get("enum"), list) and left["enum"] and all(map(_is_plain, left["enum"])):
        written["enum"] = left.pop("enum")
    if "const" in left and _is_plain(left["const"]):
        written["const"] = left.pop("const")
    return written


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _object(left: dict[str, Any], param: str) -> dict[str, Any]:
    """The object without additional properties: an answer that is valid for it is valid for the open object as well."""
    named = left.pop("properties", None)
    properties = named if isinstance(named, Mapping) else {}
    is_open = left.pop("additionalProperties", properties is not named) is not False or "patternProperties" in left
    if is_open and not properties:
        raise unsupported(param, _NAMELESS)
    written = {"properties": {name: _supported_schema(inner, param) for name, inner in properties.items()}}
    return {**written, "additionalProperties": False} | (
        {"required": left.pop("required")} if "required" in left else {}
    )


def _check_references(schema: Mapping[str, Any], param: str) -> None:
    """Raises UpstreamError for a reference outside of `$defs`, or a definition that contains itself."""
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
    """Every reference in a translated schema."""
    if isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for inner in schema.values():
            yield from _references(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _references(inner)
