"""Decides whether a finite value satisfies a lowered schema, and whether its keys may have one spelling only.

Patterns, numbers and lengths are ignored: a schema that fails by these alone counts as satisfiable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from inference.worker.constraints.disjoint import kinds
from inference.worker.constraints.schema_limits import MAX_HOPS, MAX_MERGED, MAX_VISITS, SchemaError

_REF = "#/$defs/"
_NONE: frozenset[str] = frozenset()


def finite(lowered: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The schema with `false` for parts without a finite value; raises SchemaError if no value is possible.

    `names`: the `$ref` of the request for each definition.
    """
    defs: dict[str, Any] = lowered.get("$defs", {})
    if not defs:
        return lowered
    found = _FiniteTypes(defs)
    found.find(names)
    dead = {name for name in defs if not found.types[name]}
    if not dead:
        return lowered
    if not found.of(lowered):
        raise SchemaError(
            names[min(dead, key=lambda name: int(name[1:]))],
            "no finite value satisfies this $ref: its target requires itself again, or allows nothing; "
            "leave out one of the references, make it optional, or allow null beside it with anyOf",
        )
    _prune(lowered, dead)
    left = {name: node for name, node in defs.items() if name not in dead}
    return {**{key: value for key, value in lowered.items() if key != "$defs"}, **({"$defs": left} if left else {})}


def check_merges(lowered: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Raises SchemaError for too long chains of references, and for too many references that are merged into one
    schema.
    """
    defs: Mapping[str, Any] = lowered.get("$defs", {})
    sizes: dict[str, tuple[int, int]] = {}
    for name in _referenced_first(defs):
        hops, size = 0, 1
        for other, count in _merged(defs[name]).items():
            below = sizes.get(other, (0, 1))
            hops = max(hops, below[0] + 1)
            size += count * below[1]
        if hops > MAX_HOPS:
            raise SchemaError(names[name], f"a chain of more than {MAX_HOPS} references")
        if size > MAX_MERGED:
            raise SchemaError(names[name], f"more than {MAX_MERGED} references are merged into one schema; use fewer")
        sizes[name] = hops, size


def has_open_names(lowered: Mapping[str, Any]) -> bool:
    """Whether an object has named and other keys. Then each key may have one spelling only, because another key with
    escapes could be read as a named one.
    """
    for node in _nodes(lowered):
        is_named = any(node.get(key) for key in ("properties", "required", "patternProperties"))
        if is_named and node.get("additionalProperties") is not False:
            return True
        if node.get("patternProperties") and (node.get("properties") or node.get("required")):
            return True
    return False


class _FiniteTypes:
    """For every definition, the JSON types that its finite values can have (the least fixpoint)."""

    def __init__(self, defs: Mapping[str, Any]) -> None:
        self._defs = defs
        self.types: dict[str, frozenset[str]] = dict.fromkeys(defs, _NONE)

    def find(self, names: Mapping[str, str]) -> None:
        """Repeats until nothing changes; raises SchemaError if that takes too long."""
        order = list(_referenced_first(self._defs))
        for _round in range(MAX_VISITS // sum(1 for _node in _nodes({"$defs": self._defs}))):
            is_changed = False
            for name in order:
                types = self.of(self._defs[name])
                is_changed |= types != self.types[name]
                self.types[name] = types
            if not is_changed:
                return
        raise SchemaError(names[order[-1]], "the references are too complex to decide whether a finite value exists")

    def of(self, node: Any) -> frozenset[str]:
        """The JSON types of the finite values of one schema."""
        if not isinstance(node, Mapping):
            return kinds({}) if node else _NONE
        left = kinds(node)
        if "$ref" in node:
            left &= self.types[node["$ref"].removeprefix(_REF)]
        for item in node.get("allOf", ()):
            left &= self.of(item)
        for key in ("anyOf", "oneOf"):
            if key in node:
                left &= frozenset[str]().union(*(self.of(item) for item in node[key]))
        if "object" in left and not self._has_object(node):
            left -= {"object"}
        if "array" in left and not self._has_array(node):
            left -= {"array"}
        return left

    def _has_object(self, node: Mapping[str, Any]) -> bool:
        named = node.get("properties", {})
        return all(self.of(named[name]) for name in node.get("required", ()) if name in named)

    def _has_array(self, node: Mapping[str, Any]) -> bool:
        least = node.get("minItems", 0)
        first = node.get("prefixItems", [])
        return all(self.of(item) for item in first[:least]) and (
            least <= len(first) or bool(self.of(node.get("items", True)))
        )


def _nodes(lowered: Any) -> Iterator[Any]:
    """All schema objects within one, itself first."""
    waiting: list[Any] = [lowered]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            yield node
            waiting += _parts(node)


def _parts(node: Mapping[str, Any]) -> Iterator[Any]:
    for key in ("properties", "patternProperties", "$defs"):
        yield from node.get(key, {}).values()
    for key in ("allOf", "anyOf", "oneOf", "prefixItems"):
        yield from node.get(key, ())
    for key in ("additionalProperties", "items"):
        if key in node:
            yield node[key]


def _merged(node: Any) -> dict[str, int]:
    """How often each definition is merged into a schema. References of nested values do not count."""
    found: dict[str, int] = {}
    waiting = [node]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            if "$ref" in part:
                name = part["$ref"].removeprefix(_REF)
                found[name] = found.get(name, 0) + 1
            waiting += part.get("allOf", ())
    return found


def _referenced_first(defs: Mapping[str, Any]) -> Iterator[str]:
    """The definitions, each after those that it refers to, except in cycles."""
    seen: set[str] = set()
    for root in defs:
        stack: list[tuple[str, Iterator[Any]]] = []
        if root not in seen:
            seen.add(root)
            stack.append((root, _nodes(defs[root])))
        while stack:
            name, nodes = stack[-1]
            for node in nodes:
                other = node.get("$ref", "").removeprefix(_REF)
                if other and other not in seen:
                    seen.add(other)
                    stack.append((other, _nodes(defs[other])))
                    break
            else:
                stack.pop()
                yield name


def _prune(schema: Any, dead: set[str]) -> None:
    """Replaces references to definitions without finite values by false."""
    for node in _nodes(schema):
        for key in ("properties", "patternProperties"):
            for name, item in node.get(key, {}).items():
                if _is_dead(item, dead):
                    node[key][name] = False
        for key in ("allOf", "anyOf", "oneOf", "prefixItems"):
            for index, item in enumerate(node.get(key, ())):
                if _is_dead(item, dead):
                    node[key][index] = False
        for key in ("additionalProperties", "items"):
            if _is_dead(node.get(key), dead):
                node[key] = False


def _is_dead(item: Any, dead: set[str]) -> bool:
    return isinstance(item, Mapping) and item.get("$ref", "").removeprefix(_REF) in dead
