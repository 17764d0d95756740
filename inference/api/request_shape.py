"""Describes the shape of a request for crash records: counts and sizes, not its texts."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

_ABSENT = Raw(b"null")


class Envelope(msgspec.Struct, frozen=True):
    """The fields of a body that the service reads, each as the JSON that was sent. Workers decode the body."""

    model: Raw = _ABSENT
    stream: Raw = _ABSENT
    messages: Raw = _ABSENT
    tools: Raw = _ABSENT
    documents: Raw = _ABSENT
    max_tokens: Raw = _ABSENT
    max_completion_tokens: Raw = _ABSENT
    n: Raw = _ABSENT
    response_format: Raw = _ABSENT
    grammar: Raw = _ABSENT
    regex: Raw = _ABSENT
    json_schema: Raw = _ABSENT


_LISTS = ("messages", "tools", "documents")
_NUMBERS = ("max_tokens", "max_completion_tokens", "n")
_SETTINGS = ("response_format", "grammar", "regex", "json_schema")

envelope_of = msgspec.json.Decoder(Envelope).decode
"""The envelope of a body; raises msgspec.DecodeError for invalid JSON, its subclass ValidationError for no object."""
_items = msgspec.json.Decoder(list[Raw]).decode


def shape_of(path: str, body_bytes: int, envelope: Envelope) -> dict[str, Any]:
    """Path, bytes and stream; where they are given, the number of messages, tools and documents, and limits."""
    given = {name: bytes(getattr(envelope, name)) for name in (*_LISTS, *_NUMBERS, *_SETTINGS, "stream")}
    shape: dict[str, Any] = {"path": path, "body_bytes": body_bytes, "stream": given["stream"] == b"true"}
    shape |= {name: len(_items(given[name])) for name in _LISTS if given[name].startswith(b"[")}
    shape |= {name: int(given[name]) for name in _NUMBERS if given[name].isdigit()}
    if any(given[name] != b"null" for name in _SETTINGS):
        shape["constrained"] = True
    return shape
