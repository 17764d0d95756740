"""Resolves `$ref` within a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin


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
        """The base URI inside `node`, whose own is `base`."""
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
                raise UnknownReferenceError("points at nothing")
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
