"""Reads JSON of providers, which is not validated: parts of an unexpected type count as absent.

orjson rejects lone surrogates. Models generate them, and some providers split an emoji over two chunks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson


def dumps(value: Any) -> bytes:
    """`value` as JSON; a lone surrogate is written as an escape."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def loads(payload: bytes | str) -> Any:
    """The value in `payload`; raises ValueError for invalid JSON."""
    try:
        return orjson.loads(payload)
    except orjson.JSONDecodeError:
        try:
            return json.loads(payload)
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error


def text(holder: Mapping[str, Any], name: str) -> str:
    """The string `name` of `holder`; empty if it has none."""
    value = holder.get(name)
    return value if isinstance(value, str) else ""


def mapping(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object `name` of `holder`; empty if it has none."""
    value = holder.get(name)
    return value if isinstance(value, dict) else {}


def objects(holder: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The objects in the list `name` of `holder`; empty if it has none."""
    value = holder.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def count(holder: Any, name: str) -> int:
    """The whole number `name` of the object `holder`; 0 if there is none above 0."""
    value = holder.get(name) if isinstance(holder, Mapping) else None
    return value if isinstance(value, int) and value > 0 else 0


def is_complete(text: str) -> bool:
    """Whether `text` is a whole JSON value, and not the beginning of one; lone surrogates count as incomplete."""
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def arguments(text: str) -> dict[str, Any]:
    """The arguments of a tool call; a text that is not a JSON object is wrapped under the key `arguments`.

    So is an object with a lone surrogate, because neither providers nor the gateway take one in a later request.
    """
    if not text.strip():
        return {}
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {"arguments": text}
    return parsed if isinstance(parsed, dict) else {"arguments": text}
