"""Decides which sequences are saved when a model is offloaded, and whether saved ones can be restored."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retained:
    """Tokens whose cells a slot holds between requests. A larger `used_at` means used more recently."""

    slot: int
    tokens: array[int]
    tenant: str
    used_at: int = 0


def chosen(retained: Sequence[Retained], sizes: Mapping[int, int], most_bytes: int) -> list[Retained]:
    """The sequences that fit into `most_bytes` together, most recently used first; `sizes` are bytes per slot."""
    kept = []
    for sequence in sorted(retained, key=lambda item: item.used_at, reverse=True):
        if sizes[sequence.slot] <= most_bytes:
            most_bytes -= sizes[sequence.slot]
            kept.append(sequence)
    return kept


def differing(saved: Mapping[str, object], now: Mapping[str, object]) -> tuple[str, ...]:
    """The keys whose values differ between the two mappings, sorted."""
    return tuple(sorted(name for name in saved.keys() | now.keys() if saved.get(name) != now.get(name)))
