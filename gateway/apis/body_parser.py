"""Parses the JSON body of a request within bounds: the depth of nesting and the number of values.

Parsers and checks cost time and memory per value, not per byte: 32 MB of text is a long prompt, 32 MB of commas is an
attack. Every step is linear in the size of the body.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import orjson

from gateway.errors import RequestError
from headgate.shared.bodies.body_decoder import InvalidBodyError, not_finite
from inference.protocol import Code

MAX_NESTING = 100
"""Levels of arrays and objects; deeper bodies are attacks on a parser, not requests."""

MAX_VALUES = 250_000
"""Limit of values in arrays and objects; a prompt of 131,072 token ids has fewer."""

_TOO_DEEP = f"the body is nested deeper than {MAX_NESTING} levels; flatten it"

_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

_EXPLAINED_BYTES = 2**20
"""Larger invalid bodies are not parsed a second time for a better error message."""

P = ParamSpec("P")
T = TypeVar("T")


def with_request_errors(read: Callable[P, T]) -> Callable[P, T]:
    """Wraps `read` so that it raises RequestError instead of InvalidBodyError."""

    @functools.wraps(read)
    def wrapped(*args: P.args, **more: P.kwargs) -> T:
        try:
            return read(*args, **more)
        except InvalidBodyError as error:
            raise RequestError(Code(error.code), error.message, param=error.param) from error.__cause__

    return wrapped


def parse_json(raw: bytes) -> dict[str, Any]:
    """The object in `raw`; raises RequestError for invalid JSON, another value, too many values or too deep nesting."""
    check_count(raw)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if not raw.strip():
            raise RequestError(Code.INVALID_JSON, "the body is empty; send a JSON object") from None
        if "depth limit" in str(error):
            raise RequestError(Code.INVALID_JSON, _TOO_DEEP) from None
        param = not_finite(raw) if len(raw) <= _EXPLAINED_BYTES else None
        raise RequestError(Code.INVALID_JSON, f"the body is not valid JSON: {error}", param=param) from error
    if not isinstance(body, dict):
        raise RequestError(Code.INVALID_JSON, "the body must be a JSON object")
    if raw.count(b"{") + raw.count(b"[") > MAX_NESTING:
        check_depth(body)
    return body


class RefusedBody(NamedTuple):
    """The parts of a rejected body that its explain record needs. `model` is empty if the body names none."""

    model: str
    is_stream: bool
    fields: Mapping[str, Any]


def refused_body(raw: bytes) -> RefusedBody | None:
    """Parses a rejected body for its explain record; None if it is too long to be parsed a second time."""
    if len(raw) > _EXPLAINED_BYTES:
        return None
    try:
        fields = parse_json(raw)
    except RequestError:
        fields = {}
    model = fields.get("model")
    return RefusedBody(model if isinstance(model, str) else "", fields.get("stream") is True, fields)


def check_count(raw: bytes) -> None:
    """Raises RequestError (400) when a body that is not parsed yet holds more values than a request may."""
    if len(raw) < 2 * MAX_VALUES:  # a value and its comma, or an empty array, are two bytes
        return
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") < MAX_VALUES:
        return
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 4 * MAX_VALUES:  # a name and a text, two quotes each
        raise _too_many()
    outside = b"".join(plain.split(b'"')[::2])
    if outside.count(b",") + len(outside.translate(None, _NO_BRACKETS)) // 2 > MAX_VALUES:
        raise _too_many()


def check_depth(value: dict[str, Any] | list[Any]) -> None:
    """Raises RequestError (400) when `value`, an object or array of parsed JSON, nests deeper than a request may."""
    level: list[Any] = [value]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for holder in level
            for inner in (holder.values() if type(holder) is dict else holder)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return
    raise RequestError(Code.INVALID_JSON, _TOO_DEEP)


def _too_many() -> RequestError:
    return RequestError(Code.INVALID_JSON, f"the body contains more than {MAX_VALUES} values; send fewer")
