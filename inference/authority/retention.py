"""Which models stay in the warm pool, and which are dropped when host memory is needed.

The pool is booked on the account of the host, so that INFERENCE_CPU_MEMORY_MAX_PERCENT limits loaded and warm models
together. INFERENCE_MEMORY_LIMIT_GB limits loaded ones only. The worth of a warm model is bytes x seconds saved x
recency of use, the measure of all evictions; of all sets of models that suffice, the one of lowest worth is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from inference.authority.placement.ledger import Ledger, LedgerError
from inference.authority.placement.victims import cheapest

HOST = "cpu"
"""The account of warm models."""
SLOWEST_COPY_BYTES_PER_SECOND = 20e6
"""The slowest disk that is worth waiting for, in bytes per second."""
MIN_STORE_SECONDS = 15.0
"""The limit for storing sequences or taking a file into memory, before the time for their bytes is added."""


class Mechanism(StrEnum):
    """How a model is kept."""

    STANDBY = "standby"
    """on the CPU: its process stays, without the context"""
    RESIDENT = "resident"
    """on an accelerator: a new process without a device has the file in memory"""
    CHECKPOINT = "checkpoint"
    """on a simulated device or (experimental) an NVIDIA GPU: its process is suspended, its device memory in host memory
    """


@dataclass(frozen=True, slots=True)
class Warm:
    """A model that is or could be in the warm pool. `saves_seconds`: the time saved compared with a load."""

    model: str
    bytes: int
    saves_seconds: float
    last_used_at: float

    def worth(self, now: float) -> float:
        """The cost of dropping it, without a unit."""
        idle_seconds = max(0.0, now - self.last_used_at)
        return self.bytes * max(self.saves_seconds, 0.01) / (1.0 + idle_seconds / 60.0)


@dataclass(frozen=True, slots=True)
class EvictedModel:
    """A loaded model that is evicted for another one. `warm` is None if it cannot be kept."""

    model: str
    holding: str
    warm: Warm | None


def displaced(newcomer: Warm, kept: Sequence[Warm], missing_bytes: int, now: float) -> tuple[str, ...] | None:
    """The models of `kept` with the lowest worth that release `missing_bytes` for `newcomer`.

    None if all of `kept` do not suffice, or if the found models are worth more than `newcomer`.
    """
    costs = [warm.worth(now) for warm in kept]
    chosen = cheapest(costs, [[warm.bytes] for warm in kept], [missing_bytes])
    if chosen is None or sum(costs[at] for at in chosen) > newcomer.worth(now):
        return None
    return tuple(kept[at].model for at in chosen)


def kept_of(evicted: Sequence[EvictedModel], need: Mapping[str, int], ledger: Ledger, now: float) -> frozenset[str]:
    """The models of `evicted` that can be kept beside `need`; models with the highest worth are tried first.

    No warm model is dropped for them, because memory is short.
    """
    after = ledger.without([model.holding for model in evicted])
    try:
        after = after.reserve("newcomer", "newcomer", need)
    except LedgerError:  # other models must be evicted as well, so there is no memory to keep models
        return frozenset()
    kept = []
    for warm in sorted((item.warm for item in evicted if item.warm), key=lambda item: item.worth(now), reverse=True):
        try:
            after = after.reserve(f"warm {warm.model}", warm.model, {HOST: warm.bytes}, exempt=True)
        except LedgerError:
            continue
        kept.append(warm.model)
    return frozenset(kept)
