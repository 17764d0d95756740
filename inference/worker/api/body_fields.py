"""Reads single fields of a request body and checks their types and ranges."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any, overload

from headgate.shared.parameters import Parameter
from inference.protocol import Code
from inference.worker.worker_errors import BadRequestError

MAX_INTEGER = 2**53 - 1
"""JSON numbers above it are not exact."""


def known(body: Any, names: Collection[str]) -> dict[str, Any]:
    """The fields of `body` that are not null; raises for any other field and for a body of another type."""
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    for name in body:
        if name not in names:
            close = difflib.get_close_matches(name[:80], names, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise BadRequestError(f"unknown field {name[:80]!r}{hint}", name[:80])
    return {name: value for name, value in body.items() if value is not None}


def boolean(given: Mapping[str, Any], name: str, default: bool, *, prefix: str = "") -> bool:
    """A boolean."""
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequestError(f"{prefix}{name} must be true or false", prefix + name)
    return value


def parameter(given: Mapping[str, Any], row: Parameter, default: Any = None) -> Any:
    """A declared parameter; `default` where it is absent or has a value that counts as absent."""
    value = given.get(row.name)
    if row.kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or (row.kind == "strings" and value == []) or (row.minus_one and value == -1):
        return default
    if (problem := row.problem(value)) is not None:
        is_refused = isinstance(value, bool) and row.only is not None
        code = Code.UNSUPPORTED_PARAMETER if is_refused else Code.INVALID_REQUEST
        raise BadRequestError(f"{row.name} {problem}", row.name, code=code)
    if row.kind == "number":
        return float(value)
    return tuple(value) if row.kind == "strings" else value


@overload
def integer(given: Mapping[str, Any], name: str, default: int, low: int, high: int | None = None) -> int: ...
@overload
def integer(given: Mapping[str, Any], name: str, default: None, low: int, high: int | None = None) -> int | None: ...
def integer(given: Mapping[str, Any], name: str, default: int | None, low: int, high: int | None = None) -> int | None:
    """A whole number from `low` to `high`, both allowed; 3.0 counts as 3."""
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequestError(f"{name} must be a whole number", name)
    if not low <= value <= (MAX_INTEGER if high is None else high):
        bounds = f"at least {low}" if high is None and value < low else f"from {low} to {high or MAX_INTEGER}"
        raise BadRequestError(f"{name} must be {bounds}", name)
    return value


def number(given: Mapping[str, Any], name: str, default: float, low: float, high: float, *, prefix: str = "") -> float:
    """A finite number from `low` to `high`, both allowed."""
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadRequestError(f"{prefix}{name} must be a finite number", prefix + name)
    if not low <= value <= high:
        raise BadRequestError(f"{prefix}{name} must be from {low:g} to {high:g}", prefix + name)
    return float(value)


def text(given: Mapping[str, Any], name: str) -> str | None:
    """A string, maybe an empty one; None when absent."""
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequestError(f"{name} must be a string", name)
    return value


def mapping(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object, empty when absent."""
    value = given.get(name, {})
    if not isinstance(value, dict):
        raise BadRequestError(f"{name} must be an object", name)
    return value
