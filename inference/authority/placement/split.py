"""Divides consecutive layers over the fewest possible devices, evenly filled.

llama.cpp takes devices in a given order and assigns each a run of layers. For one order, filling each device before the
next shows whether a division exists. Devices with more room are never worse, so of k devices only the k largest rooms
are considered, in every order while they are few.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

EVERY_ORDER = 4
"""Up to this number of devices every order is tried; beyond it, only largest room first and largest room last."""
_HALVINGS = 10


def fewest(sums: Sequence[int], rooms: Mapping[str, int], least: int = 1) -> list[str] | None:
    """The fewest devices, at least `least`, that have room for all layers, in a possible order; None if there are none.

    `sums` are the bytes of the first 0, 1, 2, ... layers; `rooms` are the bytes of each device without its fixed need.
    """
    if sum(room for room in rooms.values() if room > 0) < sums[-1]:
        return None
    names = sorted((name for name, room in rooms.items() if room > 0), key=lambda name: -rooms[name])
    total = 0
    for count, name in enumerate(names[: len(sums) - 1], 1):
        total += rooms[name]
        if count >= least and total >= sums[-1] and (order := _order(sums, names[:count], rooms)):
            return order
    return None


def divide(sums: Sequence[int], rooms: Mapping[str, int], least: int = 1) -> dict[str, int] | None:
    """The number of consecutive layers on each device, in order; None if all devices together have too little room.

    Uses the fewest devices, at least `least`, evenly filled; `sums` and `rooms` as for `fewest`.
    """
    order = fewest(sums, rooms, least)
    return None if order is None else _even(sums, order, rooms)


def _order(sums: Sequence[int], names: list[str], rooms: Mapping[str, int]) -> list[str] | None:
    """An order of these devices (given by decreasing room) in which all layers fit; the given one if possible."""
    if _filled(sums, names, rooms, 1.0):
        return names
    if len(names) > EVERY_ORDER:
        return names[::-1] if _filled(sums, names[::-1], rooms, 1.0) else None
    # The last layer that each set of devices can reach, and the last device of that order.
    reach: dict[int, tuple[int, list[str]]] = {0: (0, [])}
    for chosen in range(1, 2 ** len(names)):
        best: tuple[int, list[str]] = (-1, [])
        for at, name in reversed(list(enumerate(names))):  # among equal orders, the largest room first
            if chosen & (1 << at):
                begin, before = reach[chosen & ~(1 << at)]
                end = bisect_right(sums, sums[begin] + rooms[name]) - 1
                if end > best[0]:
                    best = (end, [*before, name])
        reach[chosen] = best
    end, order = reach[2 ** len(names) - 1]
    return order if end == len(sums) - 1 else None


def _filled(sums: Sequence[int], order: Sequence[str], rooms: Mapping[str, int], share: float) -> dict[str, int] | None:
    """Fills each device of `order` to `share` of its room before the next; None if some layers do not fit."""
    counts = {}
    at = 0
    for name in order:
        end = bisect_right(sums, sums[at] + int(rooms[name] * share)) - 1
        counts[name] = end - at
        at = end
    return counts if at == len(sums) - 1 else None


def _even(sums: Sequence[int], order: Sequence[str], rooms: Mapping[str, int]) -> dict[str, int]:
    """The division in this order that minimizes the fill of the fullest device, by bisection."""
    low, high = 0.0, 1.0
    best = _filled(sums, order, rooms, high)
    assert best is not None
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        found = _filled(sums, order, rooms, share)
        if found is None:
            low = share
        else:
            best, high = found, share
    return best
