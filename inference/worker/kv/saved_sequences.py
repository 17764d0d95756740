"""Decides which sequences are saved when a model leaves its device, and what a saved one must match; pure."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retained:
    """What a slot holds between requests: the tokens whose cells are there. The larger `used_at`, the later used."""

    slot: int
    tokens: array[int]
    tenant: str
    used_at: int = 0


def chosen(retained: Sequence[Retained], sizes: Mapping[int, int], most_bytes: int) -> list[Retained]:
    """Those that fit into `most_bytes` together, latest used first; `sizes` are bytes per slot."""
    kept = []
    for sequence in sorted(retained, key=lambda item: item.used_at, reverse=True):
        if sizes[sequence.slot] <= most_bytes:
            most_bytes -= sizes[sequence.slot]
            kept.append(sequence)
    return kept


def differing(saved: Mapping[str, object], now: Mapping[str, object]) -> tuple[str, ...]:
    """The names in which what a sequence was saved under differs from what it would be restored under."""
    return tuple(sorted(name for name in saved.keys() | now.keys() if saved.get(name) != now.get(name)))
