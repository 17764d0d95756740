"""Describes the shape of a request for crash records: counts and sizes, not its texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

Fields = Mapping[str, msgspec.Raw]
"""The fields of a body, each as the JSON that it was sent as."""

_LISTS = ("messages", "tools", "documents")
_NUMBERS = ("max_tokens", "max_completion_tokens", "n")
_SETTINGS = ("response_format", "grammar", "regex", "json_schema")

fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
"""The fields of the object in a body; raises msgspec.DecodeError for invalid JSON and its subclass ValidationError for
another value. The values are not decoded: the worker does that.
"""
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


def shape_of(path: str, body_bytes: int, fields: Fields) -> dict[str, Any]:
    """Path, bytes and stream; where they are given, the number of messages, tools and documents, and limits."""
    given = {name: bytes(fields[name]) for name in (*_LISTS, *_NUMBERS, *_SETTINGS, "stream") if name in fields}
    shape: dict[str, Any] = {"path": path, "body_bytes": body_bytes, "stream": given.get("stream") == b"true"}
    shape |= {name: len(_items(given[name])) for name in _LISTS if given.get(name, b"").startswith(b"[")}
    shape |= {name: int(given[name]) for name in _NUMBERS if given.get(name, b"").isdigit()}
    if any(given.get(name, b"null") != b"null" for name in _SETTINGS):
        shape["constrained"] = True
    return shape
