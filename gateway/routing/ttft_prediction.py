"""Predicts when a local tier would begin to answer, and whether that is worth the wait; asks nobody and never waits.

    first token = load + queue + prompt tokens / prefill rate

All three are measured by the inference service. What is not known counts as nothing, so that it never speaks against a
tier; where a later tier is compared, it has to be known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.providers.local.model_speed import Speed
from gateway.routing.budget import Budget
from gateway.routing.chain import Candidate, Drop, Dropped


@dataclass(frozen=True, slots=True)
class Prediction:
    """The parts of the time to a first token, in seconds; None where nothing was measured."""

    load_seconds: float | None
    queue_seconds: float | None
    prefill_seconds: float | None
    prompt_tokens: int

    @classmethod
    def of(cls, speed: Speed, prompt_tokens: int) -> Prediction:
        """For a prompt of so many tokens."""
        rate = speed.prefill_tokens_per_second
        prefill = prompt_tokens / rate if rate else None
        return cls(speed.load_seconds, speed.queue_seconds, prefill, prompt_tokens)

    @property
    def wait_seconds(self) -> float:
        """Until the model takes the request, as far as known: during this time it makes no progress of its own."""
        return (self.load_seconds or 0.0) + (self.queue_seconds or 0.0)

    @property
    def seconds(self) -> float:
        """Until the first token, as far as known."""
        return self.wait_seconds + (self.prefill_seconds or 0.0)

    @property
    def is_wait_known(self) -> bool:
        """Whether every part of the wait was measured."""
        return self.load_seconds is not None and self.queue_seconds is not None

    def is_quicker_than(self, other: Prediction) -> bool:
        """Whether this one is known to begin sooner than `other` at least needs."""
        if not self.is_wait_known:
            return False
        if self.prefill_seconds is None:
            return self.wait_seconds < other.wait_seconds
        return self.seconds < other.seconds

    def __str__(self) -> str:
        parts = (
            (self.load_seconds, "to load"),
            (self.queue_seconds, "in the queue"),
            (self.prefill_seconds, f"to read about {self.prompt_tokens} tokens"),
        )
        said = ", ".join(f"{_seconds(seconds)} {what}" for seconds, what in parts if seconds)
        return f"{_seconds(self.seconds)} to the first token ({said})" if said else "no wait is known of"


@dataclass(frozen=True, slots=True)
class Allowed:
    """How long a tier may take that is not the last one, in seconds: until it takes the request, and in all."""

    wait_seconds: float
    first_token_seconds: float

    @classmethod
    def by(cls, budget: Budget, now: float) -> Allowed:
        """What the deadlines of `budget` would allow a tier that is asked `now`; see `gateway.routing.budget`."""
        return cls(min(budget.limits.load_wait, budget.share(now)), budget.commit_by - now)


def put_off(
    candidate: Candidate,
    expected: Prediction,
    allowed: Allowed,
    later: Sequence[tuple[Candidate, Prediction]],
) -> Dropped | None:
    """Why `candidate` has to wait behind `later`: asked now, it would be left before it answers; None keeps its place.

    That takes one among them that is known to be quicker, or a cloud, which loads nothing.
    """
    said = too_slow(expected, allowed)
    if said is None:
        return None
    better = next((other for other, its in later if not other.is_local or its.is_quicker_than(expected)), None)
    if better is None:
        return None
    return Dropped(candidate, Drop.TOO_SLOW, f"{said}; {better.name} is asked first", expected.wait_seconds)


def too_slow(expected: Prediction, allowed: Allowed) -> str | None:
    """Why asking would be in vain: what is expected and what is allowed; None when it may be in time."""
    if expected.wait_seconds > allowed.wait_seconds:
        return f"{expected}, and a tier before the last may keep it waiting {_seconds(allowed.wait_seconds)}"
    if expected.seconds > allowed.first_token_seconds:
        return f"{expected}, and {_seconds(max(0.0, allowed.first_token_seconds))} are left"
    return None


def _seconds(amount: float) -> str:
    return f"{amount:.3g} s"
