"""Decides how consecutive layers divide over devices: on as few as can be, evenly full; knows nothing of models.

llama.cpp takes devices in a given order and gives each a run of layers. In one order, filling each device to the brim
before the next shows whether it can be done at all; devices with more room never do worse, so of k devices only the k
roomiest need be looked at, and of those every order while they are few.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

EVERY_ORDER = 4
"""Most devices whose every order is tried; of more, the roomiest first and the roomiest last."""
_HALVINGS = 10


def fewest(sums: Sequence[int], rooms: Mapping[str, int], least: int = 1) -> list[str] | None:
    """The fewest devices, at least `least`, that can hold all layers, in an order in which they can; None if none can.

    `sums` are the bytes of the first 0, 1, 2, ... layers; `rooms` those of each device after what it needs whatever it
    holds.
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
    """How many consecutive layers each device takes, in order, or None when all devices together cannot hold them.

    Fewest devices first, at least `least`, then evenly full; `sums` and `rooms` as for `fewest`.
    """
    order = fewest(sums, rooms, least)
    return None if order is None else _even(sums, order, rooms)


def _order(sums: Sequence[int], names: list[str], rooms: Mapping[str, int]) -> list[str] | None:
    """An order of these devices, given roomiest first, in which they hold everything: as given where that will do."""
    if _filled(sums, names, rooms, 1.0):
        return names
    if len(names) > EVERY_ORDER:
        return names[::-1] if _filled(sums, names[::-1], rooms, 1.0) else None
    # The farthest layer that each set of devices can reach, and by which of them it is reached last.
    reach: dict[int, tuple[int, list[str]]] = {0: (0, [])}
    for chosen in range(1, 2 ** len(names)):
        best: tuple[int, list[str]] = (-1, [])
        for at, name in reversed(list(enumerate(names))):  # of orders that do as well, the roomiest first
            if chosen & (1 << at):
                begin, before = reach[chosen & ~(1 << at)]
                end = bisect_right(sums, sums[begin] + rooms[name]) - 1
                if end > best[0]:
                    best = (end, [*before, name])
        reach[chosen] = best
    end, order = reach[2 ** len(names) - 1]
    return order if end == len(sums) - 1 else None


def _filled(sums: Sequence[int], order: Sequence[str], rooms: Mapping[str, int], share: float) -> dict[str, int] | None:
    """Each device of `order` filled to `share` of its room before the next; None when that does not hold everything."""
    counts = {}
    at = 0
    for name in order:
        end = bisect_right(sums, sums[at] + int(rooms[name] * share)) - 1
        counts[name] = end - at
        at = end
    return counts if at == len(sums) - 1 else None


def _even(sums: Sequence[int], order: Sequence[str], rooms: Mapping[str, int]) -> dict[str, int]:
    """The division in this order whose fullest device is least full, as near as a few halvings come."""
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
