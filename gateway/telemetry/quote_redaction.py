"""Removes quotes of the request from error messages, so that logs and records hold no prompts.

Errors of providers often repeat parts of the request. The client may read them; logs must not keep them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headgate.shared.bodies.body_decoder import Body, as_json

QUOTE_CHARS = 16
"""A common substring of at least this length counts as a quote."""
MAX_CHARS = 2**18
"""Characters of all strings of a request. With more of them the whole message is withheld."""

LEFT_OUT = "[...]"
WITHHELD = "[error message of a long request removed]"

_STEP = QUOTE_CHARS // 2
"""The message is searched in consecutive pieces of this length: a quote of QUOTE_CHARS contains at least one of
them."""


def without_quotes(text: str, body: Mapping[str, Any] | Body) -> str:
    """`text` with LEFT_OUT in place of quotes of strings in `body`, except the model's name.

    WITHHELD if the strings have more than MAX_CHARS. A text shorter than QUOTE_CHARS stays as it is.
    """
    if len(text) < QUOTE_CHARS:
        return text
    texts = _texts(as_json(body) if isinstance(body, Body) else body)
    if texts is None:
        return WITHHELD
    kept: list[str] = []
    end = 0
    for first in _quotes(text, texts):
        if first > end or not kept:
            kept += [text[end:first], LEFT_OUT]
        end = first + QUOTE_CHARS
    return "".join((*kept, text[end:]))


def _quotes(text: str, texts: str) -> list[int]:
    """Where substrings of QUOTE_CHARS in `text` begin that are also in `texts`, ascending."""
    found: set[int] = set()
    for at in range(0, len(text) - _STEP + 1, _STEP):
        if text[at : at + _STEP] in texts:
            starts = range(max(0, at - _STEP), min(at, len(text) - QUOTE_CHARS) + 1)
            found.update(first for first in starts if text[first : first + QUOTE_CHARS] in texts)
    return sorted(found)


def _texts(body: Mapping[str, Any]) -> str | None:
    """All strings of `body`, separated by NUL; None when they are too long to search."""
    found: list[str] = []
    chars = 0
    waiting: list[Any] = [value for name, value in body.items() if name != "model"]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            chars += len(value)
            if chars > MAX_CHARS:
                return None
            found.append(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return "\0".join(found)
