"""Whether and how a model fits on several devices, and which models must be evicted for it.

Consecutive layers are divided over the fewest possible devices, evenly filled. llama.cpp takes devices in a given order
and assigns each a run of layers. For one order, filling each device before the next shows whether a division exists.
More room never makes a division impossible, so for k devices the k devices with the largest rooms are tried, in every
order if k is small. Other sets of k devices are tried only if the fixed need of this set exceeds the memory limit.
Devices that share each layer (`Layers.by_tensor`) have equal shares in place of layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

from inference.authority.placement.stage import EVICTABLE, Held, Policy, Stage
from inference.authority.placement.victims import cheapest_where
from inference.estimate.layers import HOST, Layers

EVERY_ORDER = 4
"""Up to this number of devices every order is tried; beyond it, only largest room first and largest room last."""
MAX_CHOICES = 64
"""The most sets of equally many devices that are tried while the memory limit is too small for their overhead."""
_HALVINGS = 10


@dataclass(frozen=True, slots=True)
class Spread:
    """A model's layers, the accelerators `over` which they may be divided (none: host only), and the `overhead` of each
    device beyond buffers, host included, in bytes.
    """

    layers: Layers
    over: tuple[str, ...]
    overhead: Mapping[str, int]
    divide: bool = True
    """Whether divisions are possible that were not measured."""
    obstacle: str = ""
    """Why the devices cannot share it; empty if they can."""

    def need(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Bytes per device for these numbers of layers."""
        return self.layers.need(counts, self.overhead)

    def fixed(self, device: str) -> int:
        """The fixed need of one of several accelerators, without layers; bytes."""
        return self.layers.compute_bytes + self.layers.copies_bytes + self.overhead.get(device, 0)

    def alone(self, device: str) -> int:
        """The need of one accelerator with the whole accelerator part; bytes."""
        return self.layers.sums[-1] + self.layers.compute_bytes + self.overhead.get(device, 0)

    @property
    def host_bytes(self) -> int:
        """The need of host memory beside the accelerator part."""
        return self.layers.host_bytes(self.layers.offloaded) + self.overhead.get(HOST, 0)

    def budget(self, limit: int | None, *, host: bool = True) -> int | None:
        """What a memory limit leaves for the fixed needs of several accelerators; bytes, None without a limit."""
        rest = self.host_bytes + self.layers.copies_bytes if host else 0
        return None if limit is None else limit - self.layers.sums[-1] - rest

    @property
    def divisible(self) -> bool:
        """Whether more than one device may share it."""
        return self.divide and not self.obstacle and len(self.over) > 1 and self.layers.offloaded > 1


def fits(spread: Spread, stage: Stage, policy: Policy, *, dedicated: bool, host: bool = True) -> bool:
    """Whether the model fits at `stage`: on the host, one device, or several.

    Without `host`: whether the accelerator part fits.
    """
    if stage.full(policy):
        return False
    rest = {HOST: spread.host_bytes} if host else {}
    for device in spread.over or (HOST,):
        need = {device: spread.alone(device), **rest} if spread.over else rest
        if not stage.closed(device, policy, dedicated=dedicated) and not stage.ledger.lacks(need):
            return True
    return split_free(spread, stage, policy, dedicated=dedicated, host=host) is not None


def split_free(
    spread: Spread, stage: Stage, policy: Policy, *, dedicated: bool, host: bool = True
) -> dict[str, int] | None:
    """The number of layers on each device without evictions, or None."""
    if not spread.divisible or stage.full(policy):
        return None
    rooms = {
        device: stage.ledger.room(device)[0] - spread.fixed(device)
        for device in spread.over
        if not stage.closed(device, policy, dedicated=dedicated)
    }
    budget = spread.budget(stage.ledger.spare_altogether, host=host)
    counts = divide(spread.layers.sums, rooms, {device: spread.fixed(device) for device in rooms}, budget)
    if counts is None:
        return None
    need = spread.need(counts)
    if not host:
        del need[HOST]
    return None if stage.ledger.lacks(need) else counts


def split_full(
    spread: Spread, stage: Stage, policy: Policy, *, dedicated: bool, below: float
) -> tuple[dict[str, int], tuple[Held, ...]] | None:
    """The layers of each device, and idle models to evict for them: the cheapest, or of many models a cheap set.

    None if it does not fit without all idle models, or if the evictions cost `below` or more.
    """
    idle = [held for held in stage.models if held.eviction_state in EVICTABLE and held.cost(policy.now) < below]
    costs = [held.cost(policy.now) for held in idle]
    removals = _Removals(spread, stage, policy, idle, dedicated=dedicated)
    worth = [sum(held.bytes.get(device, 0) for device in spread.over) for held in idle]
    chosen = cheapest_where(costs, worth, removals)
    if chosen is None or sum(costs[at] for at in chosen) >= below:
        return None
    removals.set_removed(chosen)
    counts = removals.divided()
    assert counts is not None
    return counts, tuple(idle[at] for at in chosen)


class _Removals:
    """Checks whether the model fits without a set of idle models, incrementally from the last set."""

    def __init__(self, spread: Spread, stage: Stage, policy: Policy, idle: Sequence[Held], *, dedicated: bool) -> None:
        self._spread = spread
        self._idle = idle
        self._gone: set[int] = set()
        ledger = stage.ledger
        self._host_need = spread.host_bytes + spread.layers.copies_bytes
        self._spare = {device: ledger.spare(device) - spread.fixed(device) for device in spread.over}
        self._host_spare = ledger.spare(HOST) - self._host_need
        self._fixed = {device: spread.fixed(device) for device in spread.over}
        self._budget = spread.budget(ledger.spare_altogether)
        self._places = None if policy.max_models is None else policy.max_models - stage.loaded - 1
        self._most_there = 1 if dedicated else policy.max_models_per_device
        self._there = {device: len(stage.there.get(device, ())) for device in spread.over}
        self._owned = {device: sum(held.dedicated for held in stage.there.get(device, ())) for device in spread.over}

    def set_removed(self, chosen: Collection[int]) -> None:
        """Replaces the set of removed idle models."""
        wanted = set(chosen)
        for at in wanted - self._gone:
            self._move(self._idle[at], 1)
        for at in self._gone - wanted:
            self._move(self._idle[at], -1)
        self._gone = wanted

    def _move(self, held: Held, sign: int) -> None:
        for device, count in held.bytes.items():
            if device in self._spare:
                self._spare[device] += sign * count
        for device in held.devices:
            if device in self._spare:
                self._there[device] -= sign
                self._owned[device] -= sign * held.dedicated
        self._host_spare += sign * held.bytes.get(HOST, 0)
        if self._budget is not None:
            self._budget += sign * held.loaded_bytes
        if self._places is not None and not held.is_warm:
            self._places += sign

    def rooms(self) -> dict[str, int]:
        """The room for layers on each available device; bytes."""
        most = self._most_there
        return {
            device: room
            for device, room in self._spare.items()
            if not self._owned[device] and (most is None or self._there[device] < most)
        }

    def suffices(self) -> bool:
        """Whether the model fits without the current set."""
        if self._host_spare < 0 or (self._places is not None and self._places < 0):
            return False
        return fewest(self._spread.layers.sums, self.rooms(), self._fixed, self._budget) is not None

    def divided(self) -> dict[str, int] | None:
        """The layers of each device without the current set."""
        return divide(self._spread.layers.sums, self.rooms(), self._fixed, self._budget)


# --- division of layers ----------------------------------------------------------------------------------------------
def fewest(
    sums: Sequence[int], rooms: Mapping[str, int], fixed: Mapping[str, int], budget: int | None
) -> list[str] | None:
    """The fewest devices, at least two, that have room for all layers, in a possible order; None if there are none.

    `sums` are the bytes of the first 0, 1, 2, ... layers; `rooms` are the bytes of each device without its `fixed`
    need. `budget` limits the sum of their fixed needs.
    """
    if sum(room for room in rooms.values() if room > 0) < sums[-1]:
        return None
    names = sorted((name for name, room in rooms.items() if room > 0), key=lambda name: -rooms[name])
    total = 0
    for count, name in enumerate(names[: len(sums) - 1], 1):
        total += rooms[name]
        if count < 2 or total < sums[-1] or not (order := _order(sums, names[:count], rooms)):
            continue
        if budget is None or sum(map(fixed.__getitem__, order)) <= budget:
            return order
        if sum(sorted(fixed[name] for name in names)[:count]) > budget:
            return None
        for chosen in islice(combinations(names, count), 1, MAX_CHOICES):
            if sum(map(fixed.__getitem__, chosen)) <= budget and (order := _order(sums, [*chosen], rooms)):
                return order
    return None


def divide(
    sums: Sequence[int], rooms: Mapping[str, int], fixed: Mapping[str, int], budget: int | None
) -> dict[str, int] | None:
    """The number of consecutive layers on each device, in order; None if all devices together have too little room.

    Uses the fewest devices, at least two, evenly filled; the arguments are those of `fewest`.
    """
    order = fewest(sums, rooms, fixed, budget)
    return None if order is None else _even(sums, order, rooms)


def _order(sums: Sequence[int], names: list[str], rooms: Mapping[str, int]) -> list[str] | None:
    """An order of these devices (given by decreasing room) in which all layers fit; the given one if possible."""
    if _filled(sums, names, rooms, 1.0):
        return names
    if len(names) > EVERY_ORDER:
        return names[::-1] if _filled(sums, names[::-1], rooms, 1.0) else None
    # How many of the first layers each set of devices can take, and in which order of the devices.
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
