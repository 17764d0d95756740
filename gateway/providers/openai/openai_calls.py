"""Gives every tool call of an OpenAI stream its own index.

Google leaves `index` out or gives all parallel calls the same one, so a client that joins pieces by index would make
one call of several. Correct indices are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Numbers:
    """The calls of one choice so far: `ids` by index; `latest` is our index by the last index of the provider."""

    ids: Mapping[int, str | None] = field(default_factory=dict)
    latest: Mapping[int | None, int] = field(default_factory=dict)


def number(numbers: Numbers, pieces: list[Any]) -> tuple[Numbers, bool]:
    """Sets the index of every piece of a delta's `tool_calls` in place; the second value is whether one changed."""
    changed = False
    for piece in pieces:
        if not isinstance(piece, dict):
            continue
        given = piece.get("index")
        given = given if isinstance(given, int) else None
        numbers, index = _index_of(numbers, given, piece.get("id") or None, bool(_name(piece)))
        if index != piece.get("index"):
            piece["index"] = index
            changed = True
    return numbers, changed


def _index_of(numbers: Numbers, given: int | None, id: str | None, named: bool) -> tuple[Numbers, int]:
    known = numbers.latest.get(given)
    if id is not None:
        same = next((index for index, other in numbers.ids.items() if other == id), None)
        known = same if same is not None else known if known is not None and numbers.ids[known] is None else None
    elif given is None and named:
        known = None
    if known is None:
        free = max(numbers.ids, default=-1) + 1
        known = given if given is not None and given not in numbers.ids else free
    ids = {**numbers.ids, known: id or numbers.ids.get(known)}
    return replace(numbers, ids=ids, latest={**numbers.latest, given: known, None: known}), known


def _name(piece: Mapping[str, Any]) -> Any:
    function = piece.get("function")
    return function.get("name") if isinstance(function, dict) else None
