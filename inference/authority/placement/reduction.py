"""The steps of `oom_policy: reduce` for a model that lacks memory: clean up, smaller batch, smaller context.

The steps are taken once. Then the model keeps the smaller sizes that helped, or its requests fail, until the rest
period is over.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

REST_SECONDS = 60.0
"""Configured sizes are tried again this long after the last step."""
LEAST_UBATCH = 32
UBATCH_SHARE = 4
LEAST_CONTEXT = 256


class Step(StrEnum):
    """One step."""

    CLEAN = "clean up"
    """all models drop retained prefixes and trim their heaps"""
    UBATCH = "smaller ubatch"
    CONTEXT = "smaller context"


ORDER = tuple(Step)


@dataclass(frozen=True, slots=True)
class Descent:
    """The number of steps of ORDER that were taken, and the end of the rest period (seconds)."""

    taken: int = 0
    rests_until: float = -math.inf

    def rest(self, now: float) -> float:
        """Seconds until configured sizes may be tried again."""
        return max(0.0, self.rests_until - now)

    def rested(self, now: float) -> Descent:
        """The same, or a new one after the rest period."""
        return self if self.rest(now) else Descent()


def next_step(descent: Descent, now: float, without: Collection[Step] = ()) -> tuple[Descent, Step | None]:
    """The next step that is not in `without`; None after the last one, which begins the rest period."""
    taken = descent.taken
    while taken < len(ORDER) and ORDER[taken] in without:
        taken += 1
    if taken == len(ORDER):
        return descent, None
    return Descent(taken + 1, now + REST_SECONDS), ORDER[taken]


def smaller_ubatch(ubatch: int) -> int | None:
    """A quarter of it, with about a quarter of the compute memory; None if it is at its minimum."""
    return max(LEAST_UBATCH, ubatch // UBATCH_SHARE) if ubatch > LEAST_UBATCH else None


def smaller_context(context_length: int) -> int | None:
    """Half of it; None if it is at its minimum."""
    return max(LEAST_CONTEXT, context_length // 2) if context_length > LEAST_CONTEXT else None
