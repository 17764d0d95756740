"""Reads answers of providers, which are not validated: parts of another shape count as absent.

orjson, which reads and writes everything else, refuses a lone surrogate. Models generate them, and some providers send
the two halves of an emoji in two chunks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson


def dumps(value: Any) -> bytes:
    """`value` as JSON; half an emoji goes out as the escape it came as."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def loads(payload: bytes | str) -> Any:
    """What `payload` says; raises ValueError for what is no JSON."""
    try:
        return orjson.loads(payload)
    except orjson.JSONDecodeError:
        try:
            return json.loads(payload)
        except RecursionError as error:
            raise ValueError("it nests too deep") from error


def text(holder: Mapping[str, Any], name: str) -> str:
    """The text called `name`; empty where there is none."""
    value = holder.get(name)
    return value if isinstance(value, str) else ""


def mapping(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object called `name`; an empty one where there is none."""
    value = holder.get(name)
    return value if isinstance(value, dict) else {}


def objects(holder: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The objects in the list called `name`; nothing where there is none."""
    value = holder.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
