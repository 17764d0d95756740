"""One JSON schema while it is lowered: its dialect, the targets of its references, and its limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from inference.worker.constraints import instances
from inference.worker.constraints.closing import ALONE, OPEN, Description, Scope, describe
from inference.worker.constraints.schema_limits import (
    MAX_DEPTH,
    MAX_NODES,
    MAX_VISITS,
    Allowance,
    Multiples,
    SchemaError,
)

Lower = Callable[["Document", Mapping[str, Any], str, str, int, Scope], dict[str, Any]]
"""(document, schema object, place, base URI, depth, scope) -> the object in keywords that masks enforce."""


class Document:
    """The schema that an object is part of. `lower` lowers one object of it.

    `strict`: keywords that cannot be enforced are refused. `scope`: how the only description of a value is closed.
    `allowance`: the remaining cost limits of the form. `multiples`: all multipleOf of the document.
    """

    def __init__(
        self, schema: Mapping[str, Any] | bool, lower: Lower, *, strict: bool, allowance: Allowance, closed: bool
    ) -> None:
        self._lower = lower
        self.strict = strict
        self.scope = ALONE if closed else OPEN
        self.allowance = allowance
        self.multiples = Multiples()
        self._schema = schema
        self._dialect = schema.get("$schema", "") if isinstance(schema, Mapping) else ""
        if not isinstance(self._dialect, str) or not (
            not self._dialect or "json-schema.org/" in self._dialect or not strict
        ):
            raise SchemaError("/$schema", "only the JSON schema versions of json-schema.org are supported")
        self._old = any(f"draft-0{number}" in self._dialect for number in (3, 4, 6, 7))
        self._references = References(schema, old=self._old)
        self._targets: dict[tuple[int, Scope], tuple[str, str]] = {}
        self._kept: list[Any] = []
        self._waiting: list[tuple[str, Any, str, str, Scope]] = []
        self._nodes = 0
        self._closing_visits = 0

    def lowered(self) -> dict[str, Any]:
        """The whole schema in keywords that masks enforce, references as `#/$defs/N`; raises SchemaError."""
        root = self.node(self._schema, "", self._references.root_base, 0, self.scope)
        if root is False:
            raise SchemaError("", "the schema is false, which no value satisfies")
        lowered = root if isinstance(root, dict) else {}
        defs: dict[str, Any] = {}
        while self._waiting:
            name, node, base, at, scope = self._waiting.pop()
            defs[name] = self.node(node, at, base, 0, scope)
        if not defs:
            return lowered
        whole = {**lowered, "$defs": defs}
        names = dict(self._targets.values())
        instances.check_merges(whole, names)
        return instances.finite(whole, names)

    def node(self, node: Any, at: str, base: str, depth: int, scope: Scope) -> dict[str, Any] | bool:
        """A schema in this one, lowered."""
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            raise SchemaError(at, "a schema must be an object, true or false")
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise SchemaError(at, f"the schema is too large: it has more than {MAX_NODES} schemas")
        if depth > MAX_DEPTH:
            raise SchemaError(at, f"the schema is nested more than {MAX_DEPTH} levels deep; use $defs and $ref")
        if depth and node.get("$schema", self._dialect) != self._dialect:
            raise SchemaError(at, "a schema must not contain a schema of another JSON schema version")
        base = self._references.base_of(node, base) if depth else base
        if self._old and "$ref" in node:
            node = {"$ref": node["$ref"]}
        return self._lower(self, node, at, base, depth, scope)

    # --- for one node ------------------------------------------------------------------------------------------------
    @property
    def has_tuples_in_items(self) -> bool:
        """Whether `items` may be a list for the items of a tuple: in versions before 2020-12, and without `$schema`."""
        return "2020-12" not in self._dialect

    def reference(self, value: Any, at: str, base: str, scope: Scope) -> str:
        """The `$ref` under which the target will be found."""
        if not isinstance(value, str):
            raise SchemaError(at, "$ref must be a string")
        try:
            node, inner = self._references.find(value, base)
        except (UnknownReferenceError, ValueError) as error:
            raise SchemaError(at, f"$ref {value[:200]!r} {error}") from None
        if isinstance(node, bool):
            node = {} if node else {"allOf": [False]}
        key = (id(node), scope)
        if key not in self._targets:
            name = f"d{len(self._targets)}"
            self._targets[key] = name, value[:200]
            self._kept.append(node)  # so that no other node gets its id
            self._waiting.append((name, node, inner, value[:200], scope))
        return f"#/$defs/{self._targets[key][0]}"

    def find(self, value: str, base: str) -> Any:
        """The target of a reference, or None."""
        return None if (found := self._found(value, base)) is None else found[0]

    def _found(self, value: str, base: str) -> tuple[Any, str] | None:
        try:
            return self._references.find(value, base)
        except ValueError:
            return None

    def description(self, node: Mapping[str, Any], at: str, base: str) -> Description:
        """The description of a value that begins at `node`; raises SchemaError where it has too many parts."""

        def take(steps: int) -> None:
            self._closing_visits += steps
            if self._closing_visits > MAX_VISITS:
                raise SchemaError(at, "too many references refer to one object; name its properties in one place")

        return describe(node, base, self._found, take)


class UnknownReferenceError(ValueError):
    """The reference has no target; the message follows the reference in a sentence."""


class References:
    """Resources (`$id`) and anchors of one schema document."""

    def __init__(self, root: Any, *, old: bool) -> None:
        """`old` is a document of draft 7 or before: `id` names resources too, and siblings of `$ref` are ignored."""
        self._old = old
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], tuple[Any, str]] = {}
        self.root_base = self.base_of(root, "")
        self._index(root)

    def base_of(self, node: Any, base: str) -> str:
        """The base URI inside `node`; `base` is the one around it."""
        if not isinstance(node, Mapping) or (self._old and "$ref" in node):
            return base
        id = node.get("$id", node.get("id") if self._old else None)
        if not isinstance(id, str) or id.startswith("#"):
            return base
        return urldefrag(_join(base, id))[0]

    def find(self, reference: str, base: str) -> tuple[Any, str]:
        """The target of `reference` for the base URI `base`, and the base URI there; raises UnknownReferenceError."""
        uri, fragment = urldefrag(_join(base, reference))
        if uri not in self._resources:
            raise UnknownReferenceError("points outside the schema; put its target under $defs")
        if fragment and not fragment.startswith("/"):
            if (found := self._anchors.get((uri, unquote(fragment)))) is None:
                raise UnknownReferenceError("names an anchor that the schema does not have")
            return found
        node = self._resources[uri]
        base = self.base_of(node, uri)
        for part in fragment.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isascii() and key.isdigit() and int(key[:9]) < len(node):
                node = node[int(key)]
            else:
                raise UnknownReferenceError("points to a location that does not exist")
            base = self.base_of(node, base)
        return node, base

    def _index(self, root: Any) -> None:
        waiting = [(root, "")]
        while waiting:
            node, outer = waiting.pop()
            if isinstance(node, list):
                waiting += [(item, outer) for item in node]
            elif isinstance(node, Mapping):
                base = self.base_of(node, outer)
                if base != outer:
                    self._resources.setdefault(base, node)
                for key in ("$anchor", "$dynamicAnchor"):
                    if isinstance(name := node.get(key), str):
                        self._anchors.setdefault((base, name), (node, base))
                if isinstance(id := node.get("$id"), str) and "#" in id and not (self._old and "$ref" in node):
                    self._anchors.setdefault((base, urldefrag(id)[1]), (node, base))
                waiting += [(item, base) for key, item in node.items() if key not in ("enum", "const")]


def _join(base: str, reference: str) -> str:
    """Like urljoin, but keeps the base for fragments where its scheme (`urn:`) is not hierarchical."""
    return base + reference if reference.startswith("#") else urljoin(base, reference)
