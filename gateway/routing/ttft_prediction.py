"""Predicts the time to first token of a local model, and decides whether it is worth the wait.

    time to first token = load + queue + prompt tokens / prefill rate

The inference service measures all three. An unknown part counts as zero, so that it never defers a candidate; a later
candidate counts as quicker only when its wait is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.providers.local.candidate_facts import Speed
from gateway.routing.budget import Budget
from gateway.routing.chain import Candidate, Drop, Dropped


@dataclass(frozen=True, slots=True)
class Prediction:
    """The parts of the time to first token, in seconds; None for parts that were not measured."""

    load_seconds: float | None
    queue_seconds: float | None
    prefill_seconds: float | None
    prompt_tokens: int

    @classmethod
    def of(cls, speed: Speed, prompt_tokens: int) -> Prediction:
        """The prediction for a prompt of `prompt_tokens`."""
        rate = speed.prefill_tokens_per_second
        prefill = prompt_tokens / rate if rate else None
        return cls(speed.load_seconds, speed.queue_seconds, prefill, prompt_tokens)

    @property
    def wait_seconds(self) -> float:
        """Seconds until the model takes the request, as far as known."""
        return (self.load_seconds or 0.0) + (self.queue_seconds or 0.0)

    @property
    def seconds(self) -> float:
        """Seconds until the first token, as far as known."""
        return self.wait_seconds + (self.prefill_seconds or 0.0)

    @property
    def is_wait_known(self) -> bool:
        """Whether load and queue were measured."""
        return self.load_seconds is not None and self.queue_seconds is not None

    def is_quicker_than(self, other: Prediction) -> bool:
        """Whether this one is known to begin before the lower bound of `other`."""
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
        known = ", ".join(f"{_seconds(seconds)} {what}" for seconds, what in parts if seconds)
        return f"{_seconds(self.seconds)} to the first token ({known})" if known else "no known wait"


@dataclass(frozen=True, slots=True)
class Allowed:
    """How long a candidate before the last may take, in seconds: until it takes the request, and to the first token."""

    wait_seconds: float
    first_token_seconds: float

    @classmethod
    def by(cls, budget: Budget, now: float) -> Allowed:
        """The limits that the deadlines of `budget` set for an attempt that starts `now`."""
        return cls(min(budget.limits.load_wait, budget.share(now)), budget.commit_by - now)


def deferral(
    candidate: Candidate,
    expected: Prediction,
    allowed: Allowed,
    later: Sequence[tuple[Candidate, Prediction]],
) -> Dropped | None:
    """Why `candidate` is tried after `later`: an attempt now would be left before it answers. None keeps its place.

    A candidate is deferred only when one of `later` is known to be quicker, or is a cloud, which loads nothing.
    """
    message = too_slow(expected, allowed)
    if message is None:
        return None
    better = next((other for other, its in later if not other.is_local or its.is_quicker_than(expected)), None)
    if better is None:
        return None
    return Dropped(candidate, Drop.TOO_SLOW, f"{message}; {better.name} is tried first", expected.wait_seconds)


def too_slow(expected: Prediction, allowed: Allowed) -> str | None:
    """Why an attempt would exceed `allowed`, with both numbers; None when it may be in time."""
    if expected.wait_seconds > allowed.wait_seconds:
        return f"{expected}, and a tier before the last may keep it waiting {_seconds(allowed.wait_seconds)}"
    if expected.seconds > allowed.first_token_seconds:
        return f"{expected}, and {_seconds(max(0.0, allowed.first_token_seconds))} are left"
    return None


def _seconds(amount: float) -> str:
    return f"{amount:.3g} s"
