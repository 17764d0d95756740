"""Draws the faults of a run and their times from a seed.

Kinds are dealt like cards: every deck has each kind once in random order, so none is rarer than another, and the same
seed gives the same run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The kinds of faults. A cut device returns with `device_return`; other faults end after their seconds."""

    WORKER_KILL = "worker_kill"
    WORKER_STOP = "worker_stop"
    WORKER_ABORT = "worker_abort"
    REPLICA_KILL = "replica_kill"
    OOM_LOAD = "oom_load"
    OOM_CONTEXT = "oom_context"
    OOM_COMPUTE = "oom_compute"
    DEVICE_CUT = "device_cut"
    DEVICE_RETURN = "device_return"
    DEVICE_STALL = "device_stall"
    DEVICE_SHRINK = "device_shrink"
    DEVICE_GROWTH = "device_growth"
    NVML_ERROR = "nvml_error"
    XID = "xid"
    INFERENCE_KILL = "inference_kill"
    GATEWAY_KILL = "gateway_kill"
    DISK_FULL = "disk_full"
    RELOAD = "reload"
    DISCONNECT = "disconnect"
    BURST = "burst"
    CLOUD_OUTAGE = "cloud_outage"
    KV_DAMAGE = "kv_damage"
    KV_REMOVED = "kv_removed"
    KV_FULL = "kv_full"
    KV_KILL = "kv_kill"
    KV_SHRINK = "kv_shrink"


MIN_SHARE = 0.02
"""The lowest share of any kind among the events of a run."""
_SHORT, _LONG = 0.3, 4.0


@dataclass(frozen=True, slots=True)
class Event:
    """One fault: its start (seconds from the start of the run), its target and its duration.

    `draw` is a number from 0 to 1 for further choices of a kind.
    """

    number: int
    at_seconds: float
    kind: Kind
    model: str
    device: str
    seconds: float
    draw: float


def events(
    seed: int, count: int, gap_seconds: float, models: Sequence[str], devices: Sequence[str], kinds: Sequence[Kind]
) -> tuple[Event, ...]:
    """`count` faults of these kinds, on average `gap_seconds` apart. A cut and its return name the same device."""
    luck = random.Random(seed)
    found: list[Event] = []
    deals = 0
    while len(found) < count:
        cut = devices[deals % len(devices)]
        others = [device for device in devices if device != cut] or [cut]
        for kind in _deck(luck, kinds)[: count - len(found)]:
            number = len(found)
            is_cut = kind in (Kind.DEVICE_CUT, Kind.DEVICE_RETURN)
            found.append(
                Event(
                    number,
                    round((number + luck.uniform(-0.4, 0.4)) * gap_seconds + gap_seconds, 3),
                    kind,
                    luck.choice(models),
                    cut if is_cut else luck.choice(others),
                    round(_SHORT * (_LONG / _SHORT) ** luck.random(), 3),
                    round(luck.random(), 6),
                )
            )
        deals += 1
    return tuple(found)


def _deck(luck: random.Random, kinds: Sequence[Kind]) -> list[Kind]:
    """Every kind once; a cut comes before its return."""
    deck = list(kinds)
    luck.shuffle(deck)
    if Kind.DEVICE_CUT in deck and Kind.DEVICE_RETURN in deck:
        first, second = sorted((deck.index(Kind.DEVICE_CUT), deck.index(Kind.DEVICE_RETURN)))
        deck[first], deck[second] = Kind.DEVICE_CUT, Kind.DEVICE_RETURN
    return deck
