"""Bounds the shape of a JSON body before it is parsed: the depth of nesting and the number of values.

Parsers and checks cost time and memory per value, not per byte: 32 MB of text is a long prompt, 32 MB of commas is an
attack. For valid JSON the depth is exact and no value goes uncounted; every step is linear in the size of the body.
"""

from __future__ import annotations

from itertools import accumulate

from gateway.errors import RequestError
from inference.protocol import Code

MAX_NESTING = 100
"""Levels of arrays and objects; deeper bodies are attacks on a parser, not requests."""

MAX_VALUES = 250_000
"""Values in arrays and objects; a prompt of token ids for the longest context there is has fewer."""

_BRACKETS = b"[]{}"
_NO_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_STEP = {**dict.fromkeys(b"[{", 1), **dict.fromkeys(b"]}", -1)}


def check_shape(raw: bytes) -> None:
    """Raises RequestError (400) when `raw` nests deeper or holds more values than a request may."""
    opened = raw.count(b"[") + raw.count(b"{")
    if opened <= MAX_NESTING and (len(raw) < MAX_VALUES or raw.count(b",") + opened < MAX_VALUES):
        return
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 4 * MAX_VALUES:  # a name and a text, two quotes each
        raise _too_many()
    outside = b"".join(plain.split(b'"')[::2])
    brackets = outside.translate(None, _NO_BRACKETS)
    if outside.count(b",") + len(brackets) // 2 > MAX_VALUES:
        raise _too_many()
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > MAX_NESTING:
        raise RequestError(Code.INVALID_JSON, f"the body is nested deeper than {MAX_NESTING} levels; flatten it")


def _too_many() -> RequestError:
    return RequestError(Code.INVALID_JSON, f"the body holds more than {MAX_VALUES} values; send fewer")
