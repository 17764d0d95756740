"""Shortens names of tools to what every tier takes; one name stays one, and always the same. Knows no dialect."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import orjson

MAX_CHARS = 64
"""OpenAI and Google take no longer names; Anthropic takes 128, and an agent's own may be longer still."""

_MARK_CHARS = 12


def short_name(name: str) -> str:
    """`name`, or its beginning and a mark that is made of all of it."""
    if len(name) <= MAX_CHARS:
        return name
    mark = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_MARK_CHARS]
    return f"{name[: MAX_CHARS - _MARK_CHARS - 1]}_{mark}"


def arguments(text: str) -> dict[str, Any]:
    """Arguments as an object; what a model once wrote that is none travels whole under the key `arguments`."""
    if not text.strip():
        return {}
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {"arguments": text}
    return parsed if isinstance(parsed, dict) else {"arguments": text}
