"""Decides which models stay warm in host memory, and which are dropped when it is wanted; never moves a byte.

The pool has no account of its own: what it holds is booked on the host's account like everything else of ours, so that
INFERENCE_CPU_MEMORY_MAX_PERCENT bounds loaded and warm models together. INFERENCE_MEMORY_LIMIT_GB bounds loaded ones
alone. A warm model is worth its bytes x the seconds that it saves x recency of use, the measure by which loaded models
are evicted; the least worthy is dropped first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from inference.authority.placement.ledger import Ledger, LedgerError
from inference.authority.placement.victims import cheapest

HOST = "cpu"
"""The account on which warm models are booked."""
SLOWEST_COPY_BYTES_PER_SECOND = 20e6
"""A disk that reads a model's file slower than this is not waited for."""
LEAST_SECONDS = 15.0


class Mechanism(StrEnum):
    """How a model is kept."""

    STANDBY = "standby"
    """on the CPU: its own process, without context"""
    RESIDENT = "resident"
    """of an accelerator: its file in the memory of a fresh process that has seen no device"""
    CHECKPOINT = "checkpoint"
    """of a simulated device, or (experimental) an NVIDIA GPU: its own process, whose device memory is in host memory"""


@dataclass(frozen=True, slots=True)
class Warm:
    """A model that is warm or could be. `saves_seconds`: how much sooner it is ready than from its file."""

    model: str
    bytes: int
    saves_seconds: float
    last_used_at: float

    def worth(self, now: float) -> float:
        """What dropping it costs; comparable with others' only."""
        idle_seconds = max(0.0, now - self.last_used_at)
        return self.bytes * max(self.saves_seconds, 0.01) / (1.0 + idle_seconds / 60.0)


@dataclass(frozen=True, slots=True)
class Leaver:
    """A loaded model that leaves for another one. `warm` None: it may not be kept."""

    model: str
    holding: str
    warm: Warm | None


def displaced(newcomer: Warm, kept: Sequence[Warm], missing_bytes: int, now: float) -> tuple[str, ...] | None:
    """The least worthy of `kept` that give back `missing_bytes` for `newcomer`.

    None when all of them would not suffice, or are worth more than it.
    """
    costs = [warm.worth(now) for warm in kept]
    chosen = cheapest(costs, [[warm.bytes] for warm in kept], [missing_bytes])
    if chosen is None or sum(costs[at] for at in chosen) > newcomer.worth(now):
        return None
    return tuple(kept[at].model for at in chosen)


def kept_of(leavers: Sequence[Leaver], need: Mapping[str, int], ledger: Ledger, now: float) -> frozenset[str]:
    """Those of `leavers` that can be kept and leave room for `need` all the same; the worthiest are tried first.

    Nobody who is warm already is dropped for them: memory is short here.
    """
    after = ledger.without([leaver.holding for leaver in leavers])
    try:
        after = after.reserve("newcomer", "newcomer", need)
    except LedgerError:  # somebody else has to leave as well: then there is nothing to give away
        return frozenset()
    kept = []
    for warm in sorted((item.warm for item in leavers if item.warm), key=lambda item: item.worth(now), reverse=True):
        try:
            after = after.reserve(f"warm {warm.model}", warm.model, {HOST: warm.bytes}, aside=True)
        except LedgerError:
            continue
        kept.append(warm.model)
    return frozenset(kept)
