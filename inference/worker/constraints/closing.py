"""Decides which objects of a JSON schema have only the declared properties.

llama.cpp's `json-schema-to-grammar` reads `properties` without `additionalProperties` as the whole list of properties,
because weak models otherwise invent properties until the length limit. A schema with `additionalProperties` is
interpreted as JSON Schema defines it. Several parts may describe one value (`allOf`, `anyOf`, `$ref` and similar
keywords beside `properties`). Such a description is closed as a whole: its properties are those of all its parts. The
value of a property that two parts describe stays open. Objects in `const` or `enum` keep their own properties.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_STATED = frozenset(["additionalProperties", "unevaluatedProperties"])
_LISTS = ("allOf", "anyOf", "oneOf")
_SINGLE = ("if", "then", "else")
_MAPS = ("dependentSchemas", "dependencies")
_VALUES = frozenset(
    ["patternProperties", "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", *_STATED]
)
"""Keywords with schemas of other values, beside `properties`."""
_DESCRIBING = _VALUES | {
    "properties", "propertyNames", "required", "dependentRequired", "minProperties", "$ref", *_LISTS, *_SINGLE, *_MAPS,
}  # fmt: skip
"""Keywords that take part in the description of an object or an array."""

Find = Callable[[str, str], tuple[Any, str] | None]
"""(reference, base) -> the schema and its base, None if the reference has no target."""


class Scope(NamedTuple):
    """How a schema object is closed. `begins`: this object describes a value from the start, and is not a part of
    another description. `open_values` are the properties whose values stay open, None: all values.
    """

    begins: bool
    open_values: frozenset[str] | None


ALONE = Scope(True, frozenset())
"""The object is the only description of its value, and closed."""
OPEN = Scope(False, None)
"""Neither this object nor those in it are closed."""


class Description(NamedTuple):
    """The combined parts of one description. `names` are all properties that the object may have, in order; None: it
    stays open. `open_values` as in `Scope`.
    """

    names: list[str] | None
    open_values: frozenset[str] | None


def delegates(node: Mapping[str, Any]) -> bool:
    """Whether the node only refers to schemas that describe the value, such as the options of `anyOf`.

    Each of these schemas is closed on its own.
    """
    present = _DESCRIBING & node.keys()
    if present == {"allOf"}:
        return isinstance(node["allOf"], list) and len(node["allOf"]) == 1
    return len(present) == 1 and not present.isdisjoint(("$ref", "anyOf", "oneOf"))


def describe(node: Mapping[str, Any], base: str, find: Find, take: Callable[[int], None]) -> Description:
    """The description that begins at `node`. `take` counts the parts that are looked at."""
    parts = _parts(node, base, find, take)
    counts = Counter(name for part in parts for name in _properties(part))
    values = [part for part in parts if _has_values(part)]
    if len(values) > 1 and any(_has_values(part, except_properties=True) for part in parts):
        open_values = None
    else:
        open_values = frozenset(name for name, count in counts.items() if count > 1)
    is_open = any(
        _STATED & part.keys() or _lists_objects(part) or ("patternProperties" in part and part is not node)
        for part in parts
    )
    if is_open or not any(isinstance(part.get("properties"), Mapping) for part in parts):
        return Description(None, open_values)
    return Description(list(dict.fromkeys(name for part in parts for name in _names(part))), open_values)


def _parts(node: Mapping[str, Any], base: str, find: Find, take: Callable[[int], None]) -> list[Mapping[str, Any]]:
    """`node` and all schemas of the same value."""
    found: dict[int, Mapping[str, Any]] = {}
    waiting: list[tuple[Any, str]] = [(node, base)]
    for part, base in waiting:  # grows meanwhile
        if not isinstance(part, Mapping) or id(part) in found:
            continue
        take(1)
        found[id(part)] = part
        inner = [part[key] for key in _SINGLE if key in part]
        inner += [item for key in _LISTS if isinstance(items := part.get(key), list) for item in items]
        inner += [item for key in _MAPS if isinstance(items := part.get(key), Mapping) for item in items.values()]
        waiting += [(item, base) for item in inner]
        if isinstance(reference := part.get("$ref"), str) and (target := find(reference, base)) is not None:
            waiting.append(target)
    return list(found.values())


def _has_values(part: Mapping[str, Any], *, except_properties: bool = False) -> bool:
    if any(not isinstance(part[key], bool) for key in _VALUES & part.keys()):
        return True
    return bool(_properties(part)) and not except_properties


def _lists_objects(part: Mapping[str, Any]) -> bool:
    """Whether `const` or `enum` gives whole objects, which may have properties that are not declared."""
    values = part.get("enum")
    return any(
        isinstance(value, Mapping) for value in (part.get("const"), *(values if isinstance(values, list) else ()))
    )


def _properties(part: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = part.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _names(part: Mapping[str, Any]) -> list[str]:
    """All names of properties in a part."""
    found: list[Any] = list(_properties(part))
    if isinstance(required := part.get("required"), list):
        found += required
    for key in ("dependentRequired", *_MAPS):
        if isinstance(needs := part.get(key), Mapping):
            found += needs
            found += [name for value in needs.values() if isinstance(value, list) for name in value]
    return [name for name in found if isinstance(name, str)]
