"""Validates payloads against the SDKs' own types, strictly: no missing field, no unknown field, no coercion."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """One adapter per type for the life of the process: pydantic's lazy iterators need theirs while they are read."""
    return TypeAdapter(kind)


def strictly(kind: Any, payload: Any) -> Any:
    """`payload` as `kind` (a model or a union of models). Raises ValidationError, AssertionError for unknown fields."""
    read = _adapter(kind).validate_python(payload, strict=True)
    assert not (unknown := list(_unknown(read, ""))), f"unknown fields: {unknown}"
    return read


def _unknown(value: Any, path: str) -> Iterable[str]:
    if isinstance(value, BaseModel):
        yield from (f"{path}.{name}" for name in value.model_extra or {})
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown(item, f"{path}[{index}]")


def request_of(kind: Any, payload: Mapping[str, Any]) -> Any:
    """A request checked against an SDK's TypedDict; pydantic reads its Iterable fields lazily, so all are read out."""
    return _read_out(_adapter(kind).validate_python(payload))


def _read_out(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _read_out(item) for name, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return [_read_out(item) for item in value]
    return value
