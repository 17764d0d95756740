"""Whether and how a model fits on several devices by layer, and which models must leave for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from inference.authority.placement.split import divide, fewest
from inference.authority.placement.stage import EVICTABLE, Held, Policy, Stage, Standing
from inference.authority.placement.victims import cheapest_where
from inference.estimate.layers import HOST, Layers


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

    @property
    def divisible(self) -> bool:
        """Whether more than one device may share it."""
        return self.divide and len(self.over) > 1 and self.layers.offloaded > 1


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
    counts = divide(spread.layers.sums, rooms, least=2)
    if counts is None:
        return None
    need = spread.need(counts)
    if not host:
        del need[HOST]
    return None if stage.ledger.lacks(need) else counts


def split_full(
    spread: Spread, stage: Stage, policy: Policy, *, dedicated: bool, below: float
) -> tuple[dict[str, int], tuple[Held, ...]] | None:
    """The layers of each device and the cheapest idle models that must leave for them.

    None if it does not fit without all idle models, or if the evictions cost `below` or more.
    """
    idle = [held for held in stage.models if held.standing in EVICTABLE and held.cost(policy.now) < below]
    costs = [held.cost(policy.now) for held in idle]
    crowd = _Crowd(spread, stage, policy, idle, dedicated=dedicated)
    worth = [sum(held.bytes.get(device, 0) for device in spread.over) for held in idle]
    chosen = cheapest_where(costs, worth, crowd)
    if chosen is None or sum(costs[at] for at in chosen) >= below:
        return None
    crowd.become(chosen)
    counts = divide(spread.layers.sums, crowd.rooms(), least=2)
    assert counts is not None
    return counts, tuple(idle[at] for at in chosen)


class _Crowd:
    """Checks whether the model fits without a set of idle models, incrementally from the last set."""

    def __init__(self, spread: Spread, stage: Stage, policy: Policy, idle: Sequence[Held], *, dedicated: bool) -> None:
        self._spread = spread
        self._idle = idle
        self._gone: set[int] = set()
        ledger = stage.ledger
        self._host_need = spread.host_bytes + spread.layers.copies_bytes
        self._spare = {device: ledger.spare(device) - spread.fixed(device) for device in spread.over}
        self._host_spare = ledger.spare(HOST) - self._host_need
        limit = ledger.spare_altogether
        self._altogether = None if limit is None else limit - spread.layers.sums[-1] - self._host_need
        self._places = None if policy.max_models is None else policy.max_models - stage.loaded - 1
        self._most_there = 1 if dedicated else policy.max_models_per_device
        self._there = {device: len(stage.there.get(device, ())) for device in spread.over}
        self._owned = {device: sum(held.dedicated for held in stage.there.get(device, ())) for device in spread.over}

    def become(self, chosen: Collection[int]) -> None:
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
        if self._altogether is not None:
            self._altogether += sign * held.loaded_bytes
        if self._places is not None and held.standing is not Standing.WARM:
            self._places += sign

    def rooms(self) -> dict[str, int]:
        """The room for layers on each available device; bytes."""
        most = self._most_there
        return {
            device: room
            for device, room in self._spare.items()
            if not self._owned[device] and (most is None or self._there[device] < most)
        }

    def enough(self) -> bool:
        """Whether the model fits without the current set."""
        if self._host_spare < 0 or (self._places is not None and self._places < 0):
            return False
        devices = fewest(self._spread.layers.sums, self.rooms(), least=2)
        if devices is None:
            return False
        return self._altogether is None or sum(map(self._spread.fixed, devices)) <= self._altogether
