"""Decides what a model that lacks memory tries next (`oom_policy: reduce`): clean up, smaller batch, smaller context.

Once down these steps, then it rests: it keeps the smaller sizes that helped, or is told what lacks, until the rest is
over. Does none of it itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

REST_SECONDS = 60.0
"""Configured sizes are tried again so long after the last step at the earliest."""
LEAST_UBATCH = 32
UBATCH_SHARE = 4
LEAST_CONTEXT = 256


class Step(StrEnum):
    """One thing to try."""

    CLEAN = "clean up"
    """everybody drops what is only retained, and heaps are trimmed"""
    UBATCH = "smaller ubatch"
    CONTEXT = "smaller context"


ORDER = tuple(Step)


@dataclass(frozen=True, slots=True)
class Descent:
    """How many of ORDER were taken, and until when (seconds) the model rests from that."""

    taken: int = 0
    rests_until: float = -math.inf

    def rest(self, now: float) -> float:
        """Seconds until configured sizes may be tried again."""
        return max(0.0, self.rests_until - now)

    def rested(self, now: float) -> Descent:
        """The same, or a fresh one once the rest is over."""
        return self if self.rest(now) else Descent()


def next_step(descent: Descent, now: float, without: Collection[Step] = ()) -> tuple[Descent, Step | None]:
    """The next thing to try, but nothing of `without`; None when all was tried, which rests from now on."""
    taken = descent.taken
    while taken < len(ORDER) and ORDER[taken] in without:
        taken += 1
    if taken == len(ORDER):
        return descent, None
    return Descent(taken + 1, now + REST_SECONDS), ORDER[taken]


def smaller_ubatch(ubatch: int) -> int | None:
    """A quarter of it, which takes about as much less for computing; None where it is as small as it gets."""
    return max(LEAST_UBATCH, ubatch // UBATCH_SHARE) if ubatch > LEAST_UBATCH else None


def smaller_context(context_length: int) -> int | None:
    """Half of it; None where it is as small as it gets."""
    return max(LEAST_CONTEXT, context_length // 2) if context_length > LEAST_CONTEXT else None
