"""Bounds the shape of a JSON body: the depth of nesting and the number of values.

Parsers and checks cost time and memory per value, not per byte: 32 MB of text is a long prompt, 32 MB of commas is an
attack. Every step is linear in the size of the body.
"""

from __future__ import annotations

from typing import Any

from gateway.errors import RequestError
from inference.protocol import Code

MAX_NESTING = 100
"""Levels of arrays and objects; deeper bodies are attacks on a parser, not requests."""

MAX_VALUES = 250_000
"""Values in arrays and objects; a prompt of token ids for the longest context there is has fewer."""

TOO_DEEP = f"the body is nested deeper than {MAX_NESTING} levels; flatten it"

_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


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
    raise RequestError(Code.INVALID_JSON, TOO_DEEP)


def _too_many() -> RequestError:
    return RequestError(Code.INVALID_JSON, f"the body holds more than {MAX_VALUES} values; send fewer")
