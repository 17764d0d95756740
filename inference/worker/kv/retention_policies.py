"""Decides which stored sequence is removed first when there is no room: the one of the lowest worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from inference.protocol import Priority
from inference.worker.steps import StoredSequence

Policy = Callable[[StoredSequence, float], float]
"""The worth of a sequence at a Unix time. Only the order of the worths of one policy at one time has a meaning."""

PRIORITY_SECONDS: Mapping[Priority, float] = {Priority.HIGH: 600.0, Priority.NORMAL: 0.0, Priority.LOW: -600.0}
"""A sequence of this priority counts as if its last use had been this much later."""
POSITION_SECONDS = 5.0
"""A sequence counts as if its last use had been this much earlier for each doubling of its length: short prefixes are
shared by more prompts."""
MIN_SECONDS = 1e-6
"""Lower limit of the compute time of a sequence, so that its logarithm exists."""
HALF_LIFE_SECONDS = 60.0
"""After this time without use, another use is half as likely."""


def lru(sequence: StoredSequence, now: float) -> float:
    """The time of the last use. A later one than `now`, from a clock that was changed, counts as `now`."""
    return min(sequence.used_at, now)


def priority(sequence: StoredSequence, now: float) -> float:
    """The time of the last use, moved by the priority of the request and by the length of the sequence."""
    position = POSITION_SECONDS * math.log2(len(sequence.tokens) + 1)
    return lru(sequence, now) + PRIORITY_SECONDS[sequence.priority] - position


def hybrid(sequence: StoredSequence, now: float) -> float:
    """The logarithm of the time that a byte is expected to save: compute time per byte times the chance of another use.

    The chance falls with the time since the last use. Earlier uses are not counted: conversations that have ended would
    stay too long.
    """
    age = now - lru(sequence, now)
    density = max(sequence.compute_seconds, MIN_SECONDS) / max(1, sequence.count_bytes)
    return math.log2(density) - age / HALF_LIFE_SECONDS


POLICIES: Mapping[str, Policy] = {"lru": lru, "priority": priority, "hybrid": hybrid}


def removal_key(sequence: StoredSequence, policy: Policy, now: float) -> tuple[bool, bool, float]:
    """The sort key for removal: sequences with lower keys are removed first.

    The order is: neither pinned nor with the hint `keep`, then with the hint, then pinned; within each of these groups
    the lowest worth comes first.
    """
    return sequence.pinned_until > now, sequence.keeps, policy(sequence, now)
