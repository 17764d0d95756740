"""Lowers a JSON schema to the part of draft 2020-12 that masks enforce.

Lowering resolves references, and replaces keywords of older drafts and keywords that equal simpler ones. Keywords that
cannot be enforced are refused under `strict`, with their name and place; otherwise they are left to the model if the
answer keeps its shape without them. A schema whose shape is unknown (a reference without a target) is refused in both
cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from inference.worker.constraints import patterns
from inference.worker.constraints.closing import OPEN, Scope, delegates
from inference.worker.constraints.disjoint import apart
from inference.worker.constraints.schema import Document
from inference.worker.constraints.schema_limits import EXACT, MAX_COUNT, MAX_PROPERTIES, Allowance, SchemaError

TYPES = frozenset(["null", "boolean", "integer", "number", "string", "array", "object"])
_COUNTS = frozenset(["minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"])
_BOUNDS = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
_UNCLEAR = frozenset(["$dynamicRef", "$recursiveRef", "extends"])
"""Keywords that define the shape and are not supported."""
_HAS_NO_EFFECT: Mapping[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "if": lambda value, node: "then" not in node and "else" not in node,
    "uniqueItems": lambda value, node: value is False or node.get("maxItems") in (0, 1),
    "unevaluatedItems": lambda value, node: value is True,
    "unevaluatedProperties": lambda value, node: value is True,
    "propertyNames": lambda value, node: value is True or value == {},
    "not": lambda value, node: value is False,
    "contains": lambda value, node: node.get("minContains") == 0 and "maxContains" not in node,
}
"""When a keyword that cannot be enforced has no effect."""
_OUT_OF_REACH = frozenset([*_HAS_NO_EFFECT, "divisibleBy", "disallow"])
"""Keywords that masks cannot enforce, or only in special cases: see `Node._out_of_reach`."""
_IN_PLACE = _UNCLEAR | frozenset(
    ["$ref", "allOf", "anyOf", "oneOf", "not", "if", "contains", "dependentSchemas", "dependencies"]
)
"""Beside these keywords, what `unevaluatedProperties` and `unevaluatedItems` forbid depends on the value."""
_DIGITS = 15
"""Without the decimal point, numbers of at most this many digits are below 2^53: llguidance reads them exactly."""
_PLACES = 22
"""Most decimal places that llguidance reads exactly."""


def lower(
    schema: Mapping[str, Any] | bool, *, strict: bool, allowance: Allowance | None = None, closed: bool = False
) -> dict[str, Any]:
    """The same schema in the keywords that masks enforce, references as `#/$defs/N`; raises SchemaError.

    `allowance`: the remaining cost limits of the form of this schema; without it the schema is a form of its own.
    `closed`: objects that declare properties have no others unless the schema states `additionalProperties`.
    """
    document = Document(schema, _lowered, strict=strict, allowance=allowance or Allowance(), closed=closed)
    return document.lowered()


def _lowered(
    document: Document, node: Mapping[str, Any], at: str, base: str, depth: int, scope: Scope
) -> dict[str, Any]:
    return Node(document, node, at, base, depth, scope).lowered()


class Node:
    """Lowers one schema object. Keywords keep their order, which is the order of an object's keys."""

    def __init__(
        self, document: Document, node: Mapping[str, Any], at: str, base: str, depth: int, scope: Scope
    ) -> None:
        self._names: list[str] | None = None
        self._scope = scope
        if scope.begins and not delegates(node):
            self._names, open_values = document.description(node, at, base)
            self._scope = Scope(False, open_values)
        self._document = document
        self._node = node
        self._at = at
        self._base = base
        self._depth = depth
        self._out: dict[str, Any] = {}
        self._also: list[Any] = []
        self._closed = False

    def lowered(self) -> dict[str, Any]:
        """The object in keywords that masks enforce; raises SchemaError."""
        for key, value in self._node.items():
            if key in _HANDLERS:
                _HANDLERS[key](self, key, value)
            elif key in _COUNTS:
                self._count(key, value)
            elif key in _BOUNDS:
                self._bound(key, value)
            elif key in _UNCLEAR:
                raise SchemaError(self._path(key), f"{key} is not supported; use $ref")
            elif key in _OUT_OF_REACH:
                self._out_of_reach(key, value)
            # Other keywords are annotations, or belong to a keyword that is handled above.
        if self._names is not None and not self._closed:
            self._out["properties"] = dict.fromkeys(self._names, True) | self._out.get("properties", {})
            self._closed = True
        if self._closed:
            self._out["additionalProperties"] = False
        self._check_distinct()
        if self._also:
            self._out["allOf"] = [*self._out.pop("allOf", []), *self._also]
        return self._out

    def _path(self, *parts: str | int) -> str:
        return "/".join([self._at, *(str(part).replace("~", "~0").replace("/", "~1") for part in parts)])

    def _give_up(self, key: str, problem: str) -> None:
        """Leaves a keyword to the model, or refuses it under strict."""
        if self._document.strict:
            raise SchemaError(self._path(key), problem)

    def _sub(self, node: Any, *path: str | int) -> dict[str, Any] | bool:
        """A schema of another value, such as a property."""
        is_open = self._scope.open_values is None or (path[0] == "properties" and path[1] in self._scope.open_values)
        scope = OPEN if is_open else self._document.scope
        return self._document.node(node, self._path(*path), self._base, self._depth + 1, scope)

    def _same(self, node: Any, *path: str | int) -> dict[str, Any] | bool:
        """One more schema of the same value."""
        return self._document.node(node, self._path(*path), self._base, self._depth + 1, self._scope)

    def _list(self, key: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise SchemaError(self._path(key), f"{key} must be a list that is not empty")
        return value

    def _map(self, key: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise SchemaError(self._path(key), f"{key} must be an object")
        return value

    # --- keywords ----------------------------------------------------------------------------------------------------
    def _type(self, key: str, value: Any) -> None:
        for name in self._list(key, [value] if isinstance(value, str) else value):
            if not isinstance(name, str) or name not in TYPES:
                raise SchemaError(self._path(key), f"{str(name)[:40]!r} is not one of {', '.join(sorted(TYPES))}")
        self._out[key] = value

    def _values(self, key: str, value: Any) -> None:
        values = [value] if key == "const" else self._list(key, value)
        if not all(_is_exact(item) for item in values):
            self._give_up(
                key,
                f"{key} has a number that is too large or too precise to be enforced exactly",
            )
        else:
            self._out[key] = value

    def _all_of(self, key: str, value: Any) -> None:
        self._out[key] = [self._same(item, key, index) for index, item in enumerate(self._list(key, value))]

    def _one_of(self, key: str, value: Any) -> None:
        options = self._list(key, value)
        lowered = [self._same(item, key, index) for index, item in enumerate(options)]

        def take(steps: int) -> None:
            self._document.allowance.take_comparisons(steps, self._path(key))

        if not self._document.strict or len(options) == 1 or apart(options, self._resolved, take):
            if "anyOf" in self._node:
                self._also.append({"anyOf": lowered})
            else:
                self._out["anyOf"] = lowered
        else:
            self._out[key] = lowered

    def _resolved(self, reference: str) -> Any:
        return self._document.find(reference, self._base)

    def _reference(self, key: str, value: Any) -> None:
        self._out[key] = self._document.reference(value, self._path(key), self._base, self._scope)

    def _schemas(self, key: str, value: Any) -> None:
        named = self._map(key, value)
        if len(named) > MAX_PROPERTIES:
            raise SchemaError(
                self._path(key), f"there are {len(named)} {key}; at most {MAX_PROPERTIES} can be enforced"
            )
        lowered = {name: self._sub(item, key, name) for name, item in named.items()}
        if key == "patternProperties":
            self._document.allowance.take_patterns(len(named), self._path(key))
            try:
                lowered = {patterns.of_ecma(name): item for name, item in lowered.items()}
            except patterns.PatternError as error:
                raise SchemaError(self._path(key), f"a pattern {error}") from None
        self._out[key] = lowered

    def _schema(self, key: str, value: Any) -> None:
        self._out[key] = self._sub(value, key)

    def _items(self, key: str, value: Any) -> None:
        if not isinstance(value, list):
            self._out["items"] = self._sub(value, key)
            return
        if "prefixItems" in self._node or not self._document.has_tuples_in_items:
            raise SchemaError(self._path(key), "items must be a schema; use prefixItems for the items of a tuple")
        if value:
            self._prefix(key, value)
        if "additionalItems" in self._node:
            self._out["items"] = self._sub(self._node["additionalItems"], "additionalItems")

    def _prefix(self, key: str, value: Any) -> None:
        self._out["prefixItems"] = [self._sub(item, key, index) for index, item in enumerate(self._list(key, value))]

    def _required(self, key: str, value: Any) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise SchemaError(self._path(key), "required must be a list of names")
        if value:
            self._out[key] = list(dict.fromkeys(value))

    def _count(self, key: str, value: Any) -> None:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise SchemaError(self._path(key), f"{key} must be a whole number from 0")
        if value <= MAX_COUNT:
            self._out[key] = value
        elif key.startswith("min"):
            raise SchemaError(self._path(key), f"{key} is more than {MAX_COUNT}")
        else:
            self._give_up(key, f"{key} is more than {MAX_COUNT}, which cannot be enforced")

    def _bound(self, key: str, value: Any) -> None:
        plain = "minimum" if key in ("minimum", "exclusiveMinimum") else "maximum"
        exclusive = f"exclusive{plain.capitalize()}"
        if isinstance(value, bool) and key == exclusive:  # draft 4
            if not value:
                return
            key, value = exclusive, self._node.get(plain)
        elif key == plain and self._node.get(exclusive) is True:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise SchemaError(self._path(key), f"{key} must be a number")
        if not abs(value) <= EXACT:
            self._give_up(key, f"{key} is beyond 2^53, which cannot be enforced exactly")
        elif self._is_whole() and value == int(value):
            self._out[key] = int(value)
        else:
            name, near = _inside(key, value)
            narrower = max if plain == "minimum" else min
            self._out[name] = narrower(near, self._out.get(name, near))

    def _is_whole(self) -> bool:
        kinds = self._node.get("type")
        return kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds and "number" not in kinds)

    def _multiple_of(self, key: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise SchemaError(self._path(key), f"{key} must be a number above 0")
        try:
            self._document.multiples.take(value, self._path(key))
        except SchemaError:
            if self._document.strict:
                raise
        else:
            self._out[key] = int(value) if value == int(value) else value

    def _pattern(self, key: str, value: Any) -> None:
        if not isinstance(value, str):
            raise SchemaError(self._path(key), "pattern must be a string")
        try:
            self._out[key] = patterns.of_ecma(value)
        except patterns.PatternError as error:
            self._give_up(key, f"the pattern {error}")

    def _format(self, key: str, value: Any) -> None:
        if not isinstance(value, str):
            raise SchemaError(self._path(key), "format must be a string")
        if value in patterns.FORMAT_PATTERNS:
            self._also.append({"pattern": patterns.FORMAT_PATTERNS[value]})
        elif value in patterns.BUILT_IN_FORMATS:
            self._out[key] = value
        else:
            known = ", ".join(sorted({*patterns.FORMAT_PATTERNS, *patterns.BUILT_IN_FORMATS}))
            self._give_up(key, f"the format {value[:80]!r} cannot be enforced; known are {known}")

    def _dependent(self, key: str, value: Any) -> None:
        """An object that has the property must also match the schema, or have the names, that depend on it."""
        for name, needs in self._map(key, value).items():
            if isinstance(needs, list):
                if not all(isinstance(need, str) for need in needs):
                    raise SchemaError(self._path(key, name), "must be a list of names")
                holds: list[Any] = [{"required": list(dict.fromkeys([name, *needs]))}]
            elif key == "dependentRequired":
                raise SchemaError(self._path(key, name), "must be a list of names")
            else:
                holds = [{"required": [name]}, self._same(needs, key, name)]
            self._also.append({"anyOf": [{"properties": {name: False}}, {"allOf": holds}]})

    def _out_of_reach(self, key: str, value: Any) -> None:
        if key in _HAS_NO_EFFECT and _HAS_NO_EFFECT[key](value, self._node):
            return
        if key == "propertyNames" and self._lower_property_names(value):
            return
        if not _IN_PLACE & self._node.keys():
            # Without references and combined schemas, "unevaluated" means the same as "additional".
            if key == "unevaluatedProperties":
                if "additionalProperties" not in self._node:
                    self._out["additionalProperties"] = self._sub(value, key)
                return
            if key == "unevaluatedItems":
                if "items" not in self._node or isinstance(self._node["items"], list):
                    self._out["items"] = self._sub(value, key)
                return
        self._give_up(key, f"{key} cannot be enforced")

    def _lower_property_names(self, value: Any) -> bool:
        """Lowers `propertyNames` to the listed names or one pattern, without other properties.

        Returns False if it has neither form, or beside keywords for other properties.
        """
        if not isinstance(value, Mapping) or not value.keys() <= {"type", "enum", "pattern"}:
            return False
        if value.get("type", "string") != "string" or len(value.keys() & {"enum", "pattern"}) > 1:
            return False
        if value.keys() <= {"type"}:
            return True
        if {"properties", "patternProperties", "unevaluatedProperties"} & self._node.keys():
            return False
        others = self._node.get("additionalProperties", True)
        names = value.get("enum", ())
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            return False
        if "pattern" in value:
            self._schemas("patternProperties", {value["pattern"]: others})
        else:
            self._out["properties"] = dict.fromkeys(names, self._sub(others, "additionalProperties"))
        self._closed = True
        return True

    def _check_distinct(self) -> None:
        """Unnamed keys may repeat, and JSON parsers keep the last one, so they cannot be counted."""
        least = self._out.get("minProperties", 0)
        if least > len(self._out.get("required", ())) + 1 and not self._is_closed():
            self._give_up(
                "minProperties",
                "minProperties can demand at most one key beyond those in required, unless other keys are forbidden",
            )
            self._out.pop("minProperties", None)

    def _is_closed(self) -> bool:
        return self._out.get("additionalProperties") is False and "patternProperties" not in self._out


_HANDLERS: Mapping[str, Callable[[Node, str, Any], None]] = {
    "type": Node._type,
    "enum": Node._values,
    "const": Node._values,
    "allOf": Node._all_of,
    "anyOf": Node._all_of,
    "oneOf": Node._one_of,
    "$ref": Node._reference,
    "properties": Node._schemas,
    "patternProperties": Node._schemas,
    "additionalProperties": Node._schema,
    "items": Node._items,
    "prefixItems": Node._prefix,
    "required": Node._required,
    "multipleOf": Node._multiple_of,
    "pattern": Node._pattern,
    "format": Node._format,
    "dependentRequired": Node._dependent,
    "dependentSchemas": Node._dependent,
    "dependencies": Node._dependent,
}


def _is_exact(value: Any) -> bool:
    """Whether every number in `value` is compared exactly."""
    if isinstance(value, Mapping):
        return all(_is_exact(item) for item in value.values())
    if isinstance(value, list):
        return all(_is_exact(item) for item in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    return abs(value) <= EXACT and _is_read(Decimal(repr(value)))


def _inside(key: str, value: float) -> tuple[str, float]:
    """A keyword and a value that llguidance enforces exactly and that allow only numbers which `key` and `value` allow.

    They also forbid numbers that differ from the bound only in the 15th digit or the 22nd decimal place. An
    exclusive bound that is a whole number may be replaced, because llguidance accepts it if the other bound is farther
    from 0 and has the same whole part.
    """
    is_lower = key in ("minimum", "exclusiveMinimum")
    plain = "minimum" if is_lower else "maximum"
    found = Decimal(repr(value))
    if found == found.to_integral_value():
        whole = int(found)
        if key == plain or (whole < 0 if is_lower else whole > 0):
            return key, whole
        step = min(Decimal(1), Decimal(1).scaleb(found.adjusted() + 1 - _DIGITS if whole else -_PLACES))
        step = Decimal(2) if abs(whole) == EXACT else step
        near = found + (step if is_lower else -step)
        return plain, int(near) if step >= 1 else float(near)
    if _is_read(found):
        return key, value
    unit = Decimal(1).scaleb(max(found.adjusted() + 1 - _DIGITS, -_PLACES))
    return plain, float(found.quantize(unit, ROUND_CEILING if is_lower else ROUND_FLOOR))


def _is_read(found: Decimal) -> bool:
    """Whether llguidance reads a number exactly, not as an adjacent one. A whole one is at most 2^53 here."""
    if found == found.to_integral_value():
        return True
    places = -int(found.as_tuple().exponent)
    return places <= _PLACES and abs(int(found.scaleb(places))) <= EXACT
