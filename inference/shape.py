"""Tells a request's shape for crash records: counts and sizes, never its texts; judges nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LISTS = ("messages", "tools", "documents")
_NUMBERS = ("max_tokens", "max_completion_tokens", "n")
_SETTINGS = ("response_format", "grammar", "regex", "json_schema")


def shape_of(path: str, body_bytes: int, data: Mapping[str, Any]) -> dict[str, Any]:
    """Path, bytes and stream; where there are any, how many messages, tools and documents, and what limits."""
    shape: dict[str, Any] = {"path": path, "body_bytes": body_bytes, "stream": data.get("stream") is True}
    shape |= {name: len(data[name]) for name in _LISTS if isinstance(data.get(name), list)}
    shape |= {name: data[name] for name in _NUMBERS if type(data.get(name)) is int}
    if any(data.get(name) is not None for name in _SETTINGS):
        shape["constrained"] = True
    return shape
