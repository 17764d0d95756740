"""Shortens tool names to a length that every tier accepts; a name is always shortened to the same one."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import orjson

MAX_CHARS = 64
"""The limit of OpenAI and Google; Anthropic allows 128 characters, and agents send longer names."""

_MARK_CHARS = 12


def short_name(name: str) -> str:
    """`name`, or its beginning and a hash of the whole name."""
    if len(name) <= MAX_CHARS:
        return name
    mark = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_MARK_CHARS]
    return f"{name[: MAX_CHARS - _MARK_CHARS - 1]}_{mark}"


def arguments(text: str) -> dict[str, Any]:
    """Arguments as an object; a text that is not a JSON object is wrapped under the key `arguments`."""
    if not text.strip():
        return {}
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {"arguments": text}
    return parsed if isinstance(parsed, dict) else {"arguments": text}
