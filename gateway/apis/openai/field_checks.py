"""Checks single fields of an OpenAI body: type, range, shape; never changes a value and knows no endpoint.

A check takes (value, path) and raises RequestError whose `param` is the path of what is wrong. It also says what it
takes in JSON Schema, so that the API's description is made of the checks themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from gateway.errors import RequestError
from headgate.shared.parameters import Parameter
from inference.protocol import Code


@dataclass(frozen=True, slots=True)
class Check:
    """What a value must be. `schema` says so in JSON Schema, as far as that has words; `run` has the last one."""

    run: Callable[[Any, str], None]
    schema: Mapping[str, Any]

    def __call__(self, value: Any, path: str) -> None:
        """Raises RequestError when `value` is something else."""
        self.run(value, path)


def refuse(param: str, message: str, code: Code = Code.INVALID_REQUEST) -> NoReturn:
    """Raises the RequestError for `param`."""
    raise RequestError(code, message, param=param)


def _kind(value: Any) -> str:
    """JSON's own name for what `value` is."""
    names = {
        bool: "a boolean",
        str: "a string",
        int: "a number",
        float: "a number",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), "null")


def _anything(value: Any, path: str) -> None:
    return


anything = Check(_anything, {})
"""Accepts every value; the service or the provider knows better."""


def _boolean(value: Any, path: str) -> None:
    if not isinstance(value, bool):
        refuse(path, f"`{path}` must be true or false, not {_kind(value)}")


boolean = Check(_boolean, {"type": "boolean"})
"""true or false."""


def parameter(row: Parameter) -> Check:
    """The check of a row of the parameter table."""

    def check(value: Any, path: str) -> None:
        if (problem := row.problem(value)) is not None:
            cannot = isinstance(value, bool) and row.only is not None
            refuse(path, f"`{path}` {problem}", Code.UNSUPPORTED_PARAMETER if cannot else Code.INVALID_REQUEST)

    return Check(check, row.schema())


def integer(low: float = -math.inf, high: float = math.inf) -> Check:
    """A whole number within [low, high]."""

    def check(value: Any, path: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(path, f"`{path}` must be a whole number, not {_kind(value)}")
        if not low <= value <= high:
            refuse(path, f"`{path}` must be {_range(low, high)}; it is {value}")

    return Check(check, {"type": "integer", **_bounds(low, high)})


def _bounds(low: float, high: float) -> dict[str, float]:
    return {name: bound for name, bound in (("minimum", low), ("maximum", high)) if not math.isinf(bound)}


def _range(low: float, high: float) -> str:
    if math.isinf(high):
        return f"at least {low:g}"
    return f"at most {high:g}" if math.isinf(low) else f"between {low:g} and {high:g}"


def string(low: int = 0, high: int | None = None) -> Check:
    """Text of at least `low` and at most `high` characters."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, str):
            refuse(path, f"`{path}` must be a string, not {_kind(value)}")
        if len(value) < low:
            refuse(path, f"`{path}` must not be empty")
        if high is not None and len(value) > high:
            refuse(path, f"`{path}` may hold at most {high} characters; it has {len(value)}")

    return Check(check, {"type": "string", **_sizes("Length", low, high)})


def _sizes(what: str, low: int, high: int | None) -> dict[str, int]:
    return {name: size for name, size in ((f"min{what}", low), (f"max{what}", high)) if size}


def one_of(*allowed: str) -> Check:
    """One of the given words."""

    def check(value: Any, path: str) -> None:
        if value not in allowed or not isinstance(value, str):
            said = repr(value) if isinstance(value, str) else _kind(value)
            refuse(path, f"`{path}` must be one of {', '.join(allowed)}; it is {said[:60]}")

    return Check(check, {"type": "string", "enum": list(allowed)})


def mapping(known: Mapping[str, Check] | None = None, needed: tuple[str, ...] = ()) -> Check:
    """An object; `known` checks its fields (others pass), `needed` must be there."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict):
            refuse(path, f"`{path}` must be an object, not {_kind(value)}")
        for name in needed:
            if value.get(name) is None:
                refuse(f"{path}.{name}", f"`{path}` needs `{name}`")
        if not known:
            return
        for name, item in value.items():
            if item is not None and (inner := known.get(name)) is not None:
                inner.run(item, f"{path}.{name}")

    return Check(check, object_schema(known or {}, needed))


def object_schema(known: Mapping[str, Check], needed: tuple[str, ...]) -> dict[str, Any]:
    """JSON Schema of an object with these fields; null counts as absent."""
    present: dict[str, Any] = {"not": {"type": "null"}}
    properties: dict[str, Any] = dict.fromkeys(needed, present)
    for name, check in known.items():
        properties[name] = check.schema if name in needed else {"anyOf": [check.schema, {"type": "null"}]}
    said: dict[str, Any] = {"type": "object"}
    if properties:
        said["properties"] = properties
    if needed:
        said["required"] = list(needed)
    return said


def array(item: Check = anything, low: int = 0, high: int | None = None) -> Check:
    """An array of `low` to `high` items that each pass `item`."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, list):
            refuse(path, f"`{path}` must be an array, not {_kind(value)}")
        if len(value) < low:
            refuse(path, f"`{path}` must not be empty" if low == 1 else f"`{path}` needs at least {low} items")
        if high is not None and len(value) > high:
            refuse(path, f"`{path}` may hold at most {high} items; it has {len(value)}")
        for index, inner in enumerate(value):
            item.run(inner, f"{path}[{index}]")

    return Check(check, {"type": "array", "items": item.schema, **_sizes("Items", low, high)})


def by_type(expected: str, **checks: Check) -> Check:
    """The check for the value's JSON type: keys `text`, `array`, `mapping`, `boolean`; others are refused."""
    runs = {_TYPES[kind][0]: inner.run for kind, inner in checks.items()}

    def check(value: Any, path: str) -> None:
        run = runs.get(type(value))
        if run is None:
            refuse(path, f"`{path}` must be {expected}, not {_kind(value)}")
        run(value, path)

    return Check(check, {"anyOf": [{"type": _TYPES[kind][1], **inner.schema} for kind, inner in checks.items()]})


_TYPES: Mapping[str, tuple[type, str]] = {
    "text": (str, "string"),
    "array": (list, "array"),
    "mapping": (dict, "object"),
    "boolean": (bool, "boolean"),
}
"""What the keys of `by_type` are in Python and in JSON Schema."""
