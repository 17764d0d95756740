"""Takes out of an error's words what they quote of the request, so that logs and records hold no prompt; logs nothing.

Providers and models like to repeat what they were sent. The caller may read that; the operator's files may not keep it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.apis.schema.body_decoder import Body, as_json

QUOTE_CHARS = 16
"""What both say in so many characters on end is taken for a quote."""
MOST_CHARS = 2**18
"""In a longer request nothing is looked for: then no word is kept."""

LEFT_OUT = "[...]"
WITHHELD = "[words of an error about a long request are not kept]"

_STEP = QUOTE_CHARS // 2
"""Every quote of QUOTE_CHARS holds a whole piece of the text that begins at a multiple of this and is as long."""


def without_quotes(text: str, body: Mapping[str, Any] | Body) -> str:
    """`text` with LEFT_OUT where it repeats what strings of `body` say, its model's name aside."""
    if len(text) < QUOTE_CHARS:
        return text
    said = _texts(as_json(body) if isinstance(body, Body) else body)
    if said is None:
        return WITHHELD
    kept: list[str] = []
    end = 0
    for at in range(0, len(text) - _STEP + 1, _STEP):
        if at < end or text[at : at + _STEP] not in said:
            continue
        first, last = at, at + _STEP
        while first > end and text[first - 1 : last] in said:
            first -= 1
        while last < len(text) and text[first : last + 1] in said:
            last += 1
        if last - first >= QUOTE_CHARS:
            kept += [text[end:first], LEFT_OUT]
            end = last
    return "".join((*kept, text[end:]))


def _texts(body: Mapping[str, Any]) -> str | None:
    """All strings of `body`, each on its own; None when they are too long to be looked through."""
    found: list[str] = []
    chars = 0
    waiting: list[Any] = [value for name, value in body.items() if name != "model"]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            chars += len(value)
            if chars > MOST_CHARS:
                return None
            found.append(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return "\0".join(found)
