"""Generation parameters as fields of body types, made of the table in `headgate.shared.parameters`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headgate.shared.bodies.body_decoder import INVALID, UNSUPPORTED, Body, refuse
from headgate.shared.parameters import BY_NAME, PARAMETERS, Parameter


def parameter_type(row: Parameter) -> Any:
    """The type of a generation parameter."""
    kind: Any = {"boolean": bool, "strings": list[Any], "integer": int, "number": float}[row.kind]
    bounds: dict[str, Any] = {}
    if row.kind in ("integer", "number"):
        low = min(row.low, -1) if row.minus_one else row.low
        bounds = {name: kind(bound) for name, bound in (("ge", low), ("le", row.high)) if abs(bound) != float("inf")}
    schema = {name: value for name, value in row.schema().items() if name not in ("type", "minimum", "maximum")}
    return Annotated[kind, Meta(**bounds, extra_json_schema=schema, extra={"parameter": row})] | None


def with_parameters(name: str, base: type[Body], rows: Iterable[Parameter]) -> Any:
    """A subclass of `base` that has these generation parameters as fields."""
    fields = [(row.name, parameter_type(row), None) for row in rows]
    return msgspec.defstruct(name, fields, bases=(base,), kw_only=True)


def check_parameters(given: Mapping[str, Any], names: Set[str]) -> None:
    """Checks rules beyond types: bounds with a gap, sizes in bytes, the only value of a boolean."""
    for name, value in given.items():
        if value is None or name not in names:
            continue
        if (problem := BY_NAME[name].problem(value)) is not None:
            is_refused = BY_NAME[name].only is not None
            refuse(name, f"`{name}` {problem}", UNSUPPORTED if is_refused else INVALID)


CHECKED = frozenset(row.name for row in PARAMETERS if row.minus_one or row.kind == "strings" or row.only is not None)
"""Parameters for `check_parameters`."""
