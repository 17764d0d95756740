"""Reads which shape an answer is asked to have, in OpenAI's, llama.cpp's and vLLM's words; never compiles one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from inference.worker.api import body_fields
from inference.worker.dialects.forms import Form, Grammar, Json, Literal, OneOf, Regex
from inference.worker.worker_errors import BadRequestError

MAX_PATTERN_CHARS = 2**16
MAX_GRAMMAR_CHARS = 2**18
MAX_CHOICES = 4096

_OBJECT: Mapping[str, Any] = {"type": "object"}
_SAYS_OF_WHAT = frozenset(["type", "$ref", "enum", "const", "allOf", "anyOf", "oneOf"])
_FORMATS = {"text": None, "json_object": "schema", "json_schema": "json_schema"}
"""What may stand beside each type. A schema beside `json_object` is how llama.cpp's clients ask for one."""


def form_of(given: Mapping[str, Any]) -> tuple[Form | None, str]:
    """The form of the answer and the parameter that asks for it; (None, "") where any text will do.

    Raises BadRequestError, also when two parameters ask for a shape.
    """
    asked = {name: form for name, read in _READ.items() if name in given and (form := read(given[name], name))}
    if len(asked) > 1:
        first, second, *_ = asked
        raise BadRequestError(f"{first} and {second} both say what the answer must look like; send one", second)
    for name, form in asked.items():
        return form, name
    return None, ""


def _response_format(value: Any, at: str) -> Form | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise BadRequestError(f'{at}.type must be "text", "json_object" or "json_schema"', at)
    for name in value:
        if name not in ("type", _FORMATS[kind]) and value[name] is not None:
            raise BadRequestError(f"unknown field {name[:80]!r} in {at} of type {kind}", f"{at}.{name[:80]}")
    if kind == "text":
        return None
    if kind == "json_object":
        said = value.get("schema")
        return Json(_OBJECT if said is None else _of_objects(_schema(said, f"{at}.schema")), closed=True)
    at += ".json_schema"
    said = value.get("json_schema")
    if not isinstance(said, dict):
        raise BadRequestError(f"{at} must be an object with name and schema", at)
    for name in said:
        if name not in ("name", "description", "schema", "strict"):
            raise BadRequestError(f"unknown field {name[:80]!r} in {at}", f"{at}.{name[:80]}")
    # What cannot be promised is refused unless the caller says that a promise is not needed.
    strict = body_fields.boolean(said, "strict", True, prefix=f"{at}.")
    return Json(_schema(said.get("schema"), f"{at}.schema"), strict, closed=True)


def _schema(value: Any, at: str) -> Mapping[str, Any] | bool:
    if not isinstance(value, (dict, bool)):
        raise BadRequestError(f"{at} must be a JSON schema", at)
    return value


def _of_objects(schema: Mapping[str, Any] | bool) -> Mapping[str, Any] | bool:
    """The schema, of objects unless it says itself of what it is."""
    if schema is True:
        return _OBJECT
    return schema if schema is False or _SAYS_OF_WHAT & schema.keys() else {**_OBJECT, **schema}


def _json(value: Any, at: str) -> Form:
    return Json(_schema(value, at), closed=True)


def _json_text(value: Any, at: str) -> Form:
    """vLLM takes a schema also as JSON text."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise BadRequestError(f"{at} must be a JSON schema", at) from None
    return _json(value, at)


def _text(value: Any, at: str, most: int) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequestError(f"{at} must be a string that is not empty", at)
    if len(value) > most:
        raise BadRequestError(f"{at} has {len(value)} characters; at most {most} are read", at)
    return value


def _regex(value: Any, at: str) -> Form:
    return Regex(_text(value, at, MAX_PATTERN_CHARS))


def _grammar(value: Any, at: str) -> Form:
    return Grammar(_text(value, at, MAX_GRAMMAR_CHARS))


def _choice(value: Any, at: str) -> Form:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICES:
        raise BadRequestError(f"{at} must be a list of 1 to {MAX_CHOICES} strings", at)
    return OneOf(tuple(Literal(_text(item, f"{at}[{index}]", MAX_PATTERN_CHARS)) for index, item in enumerate(value)))


def _any_object(value: Any, at: str) -> Form | None:
    if not isinstance(value, bool):
        raise BadRequestError(f"{at} must be true or false", at)
    return Json(_OBJECT) if value else None


def _structured(value: Any, at: str) -> Form | None:
    """vLLM's object with one entry."""
    said = {} if not isinstance(value, dict) else {name: item for name, item in value.items() if item is not None}
    if len(said) != 1 or (kind := next(iter(said))) not in _STRUCTURED:
        raise BadRequestError(f"{at} must hold one of {', '.join(_STRUCTURED)}", at)
    return _STRUCTURED[kind](said[kind], f"{at}.{kind}")


Reader = Callable[[Any, str], Form | None]

_STRUCTURED: Mapping[str, Reader] = {
    "json": _json_text,
    "json_object": _any_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_READ: Mapping[str, Reader] = {
    "response_format": _response_format,
    "json_schema": _json,
    "regex": _regex,
    "grammar": _grammar,
    "structured_outputs": _structured,
    **{f"guided_{name}": reader for name, reader in _STRUCTURED.items() if name != "json_object"},
}
NAMES = frozenset(_READ)
"""The fields that `form_of` reads."""
EXTENSIONS = NAMES - {"response_format"}
"""Those that OpenAI does not have."""
