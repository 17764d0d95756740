"""Decides whether and how a model fits over several devices by layer, and who must leave for that; books nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inference.core.layers import HOST, Layers
from inference.core.split import divide, fewest, sums_of
from inference.core.stage import EVICTABLE, Held, Policy, Stage, Standing
from inference.core.victims import cheapest_where


@dataclass(frozen=True, slots=True)
class Spread:
    """A model's layers, the accelerators `over` which they may go (none: it runs on the host), and what each device
    needs beside buffers (`overhead`, bytes, the host among them).
    """

    layers: Layers
    over: tuple[str, ...]
    overhead: Mapping[str, int]
    divide: bool = True
    """Whether it may be divided otherwise than measured already."""

    def need(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Bytes per device with so many layers on each."""
        return self.layers.need(counts, self.overhead)

    def fixed(self, device: str) -> int:
        """What an accelerator needs however few layers it has."""
        return self.layers.compute_bytes + self.overhead.get(device, 0)

    @property
    def divisible(self) -> bool:
        """Whether more than one device may share it."""
        return self.divide and len(self.over) > 1 and self.layers.offloaded > 1


def fits(spread: Spread, stage: Stage, policy: Policy, *, dedicated: bool, host: bool = True) -> bool:
    """Whether the model fits somewhere as `stage` is: the host, one device, or several.

    Without `host`, whether accelerators can hold what belongs on them.
    """
    layers = spread.layers
    for device in spread.over or (HOST,):
        need = spread.need({device: layers.offloaded} if spread.over else {})
        if not host:
            del need[HOST]
        if stage.obstacle((device,), need, policy, dedicated=dedicated) is None:
            return True
    return split_free(spread, stage, policy, dedicated=dedicated, host=host) is not None


def split_free(
    spread: Spread, stage: Stage, policy: Policy, *, dedicated: bool, host: bool = True
) -> dict[str, int] | None:
    """How many layers each device takes when nobody leaves, or None."""
    if not spread.divisible or stage.full(policy):
        return None
    rooms = {
        device: stage.ledger.room(device)[0] - spread.fixed(device)
        for device in spread.over
        if not stage.closed(device, policy, dedicated=dedicated)
    }
    counts = divide(spread.layers.costs, rooms, least=2)
    if counts is None:
        return None
    need = spread.need(counts)
    if not host:
        del need[HOST]
    return None if stage.ledger.lacks(need) else counts


def split_full(
    spread: Spread, stage: Stage, policy: Policy, *, dedicated: bool
) -> tuple[dict[str, int], tuple[Held, ...]]:
    """The layers of each device and the cheapest idle models that must leave for it.

    To be asked only when it fits with every idle model gone.
    """
    idle = [held for held in stage.models if held.standing in EVICTABLE]
    crowd = _Crowd(spread, stage, policy, idle, dedicated=dedicated)
    worth = [sum(held.bytes.get(device, 0) for device in spread.over) for held in idle]
    chosen = cheapest_where([held.cost(policy.now) for held in idle], worth, crowd.enough)
    assert chosen is not None
    counts = divide(spread.layers.costs, crowd.rooms(chosen), least=2)
    assert counts is not None
    return counts, tuple(idle[at] for at in chosen)


class _Crowd:
    """Answers quickly whether the model fits once some of the idle models are gone."""

    def __init__(self, spread: Spread, stage: Stage, policy: Policy, idle: Sequence[Held], *, dedicated: bool) -> None:
        self._spread = spread
        self._idle = idle
        self._dedicated = dedicated
        self._sums = sums_of(spread.layers.costs)
        self._host_need = spread.need(dict.fromkeys(spread.over, 0) | {spread.over[0]: spread.layers.offloaded})[HOST]
        ledger = stage.ledger
        self._spare = {device: ledger.spare(device) - spread.fixed(device) for device in spread.over}
        self._host_spare = ledger.spare(HOST) - self._host_need
        self._altogether = ledger.spare_altogether
        self._places = None if policy.max_models is None else policy.max_models - stage.loaded - 1
        self._most_there = 1 if dedicated else policy.max_models_per_device
        self._there = {device: len(stage.there.get(device, ())) for device in spread.over}
        self._owned = {device: sum(held.dedicated for held in stage.there.get(device, ())) for device in spread.over}

    def rooms(self, chosen: Sequence[int]) -> dict[str, int]:
        """What is left for layers on each device that is open once they are gone; bytes."""
        spare, there, owned = dict(self._spare), dict(self._there), dict(self._owned)
        for at in chosen:
            held = self._idle[at]
            for device, count in held.bytes.items():
                if device in spare:
                    spare[device] += count
                    there[device] -= 1
                    owned[device] -= held.dedicated
        return {
            device: room
            for device, room in spare.items()
            if not owned[device] and (self._most_there is None or there[device] < self._most_there)
        }

    def enough(self, chosen: Sequence[int]) -> bool:
        """Whether the model fits once they are gone."""
        places = sum(self._idle[at].standing is not Standing.WARM for at in chosen)
        if self._places is not None and self._places + places < 0:
            return False
        if self._host_spare + sum(self._idle[at].bytes.get(HOST, 0) for at in chosen) < 0:
            return False
        devices = fewest(self._sums, self.rooms(chosen), least=2)
        if devices is None:
            return False
        if self._altogether is None:
            return True
        need = self._sums[-1] + self._host_need + sum(self._spread.fixed(device) for device in devices)
        return need <= self._altogether + sum(sum(self._idle[at].bytes.values()) for at in chosen)
