"""Draws the faults of a run from a seed. Kinds are dealt like cards: a deck has each kind as often as DECK says."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The kinds of faults."""

    STORE_KILL = "store_kill"
    STORE_STOP = "store_stop"
    STORE_PARTITION = "store_partition"
    NODE_KILL = "node_kill"
    NODE_STOP = "node_stop"
    NODE_PARTITION = "node_partition"
    NODE_DELAY = "node_delay"
    NODE_RESTART = "node_restart"
    DEVICE_LOSS = "device_loss"
    GATEWAY_KILL = "gateway_kill"
    GATEWAY_RESTART = "gateway_restart"
    ISOLATION = "isolation"
    CLOCK_SKEW = "clock_skew"
    HALF_OPEN = "half_open"
    LIMITS = "limits"
    LIMITS_ALONE = "limits_alone"
    ROLLING_RESTART = "rolling_restart"


DECK: Mapping[Kind, int] = {
    Kind.STORE_KILL: 2,
    Kind.STORE_STOP: 1,
    Kind.STORE_PARTITION: 2,
    Kind.NODE_KILL: 2,
    Kind.NODE_STOP: 1,
    Kind.NODE_PARTITION: 4,
    Kind.NODE_DELAY: 3,
    Kind.NODE_RESTART: 1,
    Kind.DEVICE_LOSS: 2,
    Kind.GATEWAY_KILL: 2,
    Kind.GATEWAY_RESTART: 1,
    Kind.ISOLATION: 1,
    Kind.CLOCK_SKEW: 4,
    Kind.HALF_OPEN: 2,
    Kind.LIMITS: 3,
    Kind.LIMITS_ALONE: 2,
    Kind.ROLLING_RESTART: 1,
}
"""How often each kind is in a deck. A rolling restart takes as long as twenty other faults."""
_SHORT, _LONG = 0.3, 3.0


@dataclass(frozen=True, slots=True)
class Event:
    """One fault: its start (seconds from the start of the run), its targets (numbers) and its duration.

    `draw` is a number from 0 to 1 for further choices of a kind.
    """

    number: int
    at_seconds: float
    kind: Kind
    node: int
    gateways: tuple[int, ...]
    seconds: float
    draw: float


def events(
    seed: int, count: int, gap_seconds: float, nodes: int, gateways: int, kinds: Collection[Kind] = tuple(Kind)
) -> Sequence[Event]:
    """`count` faults of these kinds, on average `gap_seconds` apart, each at some of the gateways."""
    luck = random.Random(seed)
    found: list[Event] = []
    while len(found) < count:
        deck = [kind for kind, times in DECK.items() for _ in range(times) if kind in kinds]
        luck.shuffle(deck)
        for kind in deck[: count - len(found)]:
            number = len(found)
            at = (number + 1 + luck.uniform(-0.4, 0.4)) * gap_seconds
            some = luck.sample(range(gateways), luck.randint(1, gateways - 1))
            seconds = _SHORT * (_LONG / _SHORT) ** luck.random()
            found.append(
                Event(
                    number, round(at, 3), kind, luck.randrange(nodes), tuple(some), round(seconds, 3),
                    round(luck.random(), 6),
                )
            )  # fmt: skip
    return tuple(found)
