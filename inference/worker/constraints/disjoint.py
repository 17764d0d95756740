"""Decides by types and tags whether the options of a `oneOf` exclude each other.

Where they do, `oneOf` equals `anyOf`, which masks can enforce. llguidance decides this only for options without `$ref`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

_TYPES = frozenset(["null", "boolean", "number", "string", "array", "object"])
_HOPS = 8
"""Limit of references that are followed from one option."""

Resolve = Callable[[str], Any]
"""The target of a `$ref`, or None."""
Take = Callable[[int], None]
"""Counts steps; raises when there are too many."""


def apart(options: Iterable[Any], resolve: Resolve, take: Take) -> bool:
    """Whether no value can satisfy two of the options; raises the exceptions of `take`."""
    seen: list[Mapping[str, Any]] = []
    for option in options:
        found = _resolved(option, resolve)
        if found is None or not all(_exclude(found, other, resolve, take) for other in seen):
            return False
        seen.append(found)
    return True


def _exclude(one: Mapping[str, Any], other: Mapping[str, Any], resolve: Resolve, take: Take) -> bool:
    take(1 + len(_listed(one) or ()) + len(_listed(other) or ()))
    shared = kinds(one) & kinds(other)
    return not shared or _values_apart(one, other) or (shared == {"object"} and _tags_apart(one, other, resolve, take))


def _resolved(option: Any, resolve: Resolve) -> Mapping[str, Any] | None:
    for _hop in range(_HOPS):
        if not isinstance(option, Mapping) or not isinstance(option.get("$ref"), str):
            break
        option = resolve(option["$ref"])
    return option if isinstance(option, Mapping) and "$ref" not in option else None


def _tags_apart(one: Mapping[str, Any], other: Mapping[str, Any], resolve: Resolve, take: Take) -> bool:
    """Whether a property that both require has disjoint values."""
    first, second = one.get("properties"), other.get("properties")
    needed, wanted = one.get("required"), other.get("required")
    if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
        return False
    if not (isinstance(needed, list) and isinstance(wanted, list)):
        return False
    take(len(needed) + len(wanted))
    both = {name for name in needed if isinstance(name, str)} & {name for name in wanted if isinstance(name, str)}
    for name in both:
        left, right = _resolved(first.get(name), resolve), _resolved(second.get(name), resolve)
        if left is None or right is None:
            continue
        take(1 + len(_listed(left) or ()) + len(_listed(right) or ()))
        if _values_apart(left, right) or not kinds(left) & kinds(right):
            return True
    return False


def kinds(node: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types a value may have by `type`, or without `type` by `const` or `enum`. An integer is a number."""
    declared = node.get("type")
    if declared is None:
        values = _listed(node)
        return _TYPES if values is None else frozenset(_kind(value) for value in values)
    names = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else _TYPES
    return frozenset("number" if name == "integer" else name for name in names if isinstance(name, str))


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _listed(node: Mapping[str, Any]) -> list[Any] | None:
    """All values of a node that lists them, else None."""
    if "const" in node:
        return [node["const"]]
    return node["enum"] if isinstance(node.get("enum"), list) else None


def _values_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    first, second = _listed(one), _listed(other)
    if first is None or second is None or not all(isinstance(value, str) for value in [*first, *second]):
        return False
    return not set(first) & set(second)
