"""The checks of a candidate when its turn comes: whether the prompt fits its context, and whether it is worth the wait.

A body is not counted when its bytes fit the context at MIN_BYTES_PER_TOKEN, together with TEMPLATE_TOKENS and
`max_tokens`. Ordinary text has twice as many bytes per token. A longer prompt with fewer bytes per token is
rejected by the model itself, and the next candidate is tried.

    time to first token = load + queue + prompt tokens / prefill rate

The inference service measures all three. An unknown part counts as zero, so that no candidate is deferred because of
it; a later candidate counts as quicker only when its wait is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from gateway.providers.local.candidate_facts import Speed
from gateway.routing.budget import Budget
from gateway.routing.chain import Candidate, Drop, Dropped

# --- length -----------------------------------------------------------------------------------------------------------
TEMPLATE_TOKENS = 512
"""Tokens that a chat template may add: a system message of its own and the instructions for tool calls. The marks
around a message are shorter than the JSON around it."""

MIN_BYTES_PER_TOKEN = 2
"""Lower bound for a body, whose JSON is longer than its texts. Only unusual text, such as rows of digits, has fewer."""

BYTES_PER_TOKEN = 4
"""Average of ordinary text; for estimates only."""


class Fit(Enum):
    """Which part of a request fits a context."""

    WHOLE = "whole"
    """the prompt and all of `max_tokens`"""
    PROMPT = "prompt"
    """the prompt and at least one token: the answer may end with `length` before `max_tokens`"""
    NOTHING = "nothing"


def certainly_fits(size_bytes: int, max_tokens: int | None, context_length: int) -> bool:
    """Whether a body of `size_bytes` certainly fits the context, so that its tokens need not be counted."""
    return size_bytes / MIN_BYTES_PER_TOKEN + TEMPLATE_TOKENS + (max_tokens or 1) <= context_length


def fit(prompt_tokens: int, max_tokens: int | None, context_length: int) -> Fit:
    """Which part of a prompt of `prompt_tokens` and an answer of at most `max_tokens` fits."""
    if prompt_tokens >= context_length or (max_tokens or 0) > context_length:
        return Fit.NOTHING
    return Fit.WHOLE if prompt_tokens + (max_tokens or 1) <= context_length else Fit.PROMPT


def about_tokens(size_bytes: int) -> int:
    """A rough estimate of the tokens of a body of `size_bytes`."""
    return size_bytes // BYTES_PER_TOKEN


def is_alternative(context_length: int | None, too_short: int) -> bool:
    """Whether a context of `context_length` (None: unknown) may hold a prompt that one of `too_short` does not."""
    return context_length is None or context_length > too_short


def too_long(candidate: Candidate, prompt_tokens: int, max_tokens: int | None, context_length: int) -> Dropped:
    """The reason to drop: the prompt leaves no room for an answer, or `max_tokens` exceeds the whole context."""
    if prompt_tokens >= context_length:
        message = f"the prompt has {prompt_tokens} tokens, and the model's context holds {context_length}"
        param = None
    else:
        message = (
            f"max_tokens is {max_tokens}, and the model's context holds {context_length} tokens of prompt and answer"
        )
        param = "max_tokens"
    details = {"context_length": context_length, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens}
    return Dropped(candidate, Drop.CONTEXT, message, param=param, details=details)


def little_room(candidate: Candidate, prompt_tokens: int, max_tokens: int, context_length: int, to: str) -> Dropped:
    """The reason to defer: the prompt fits but the answer may not, and candidate `to` has room for both."""
    message = f"{prompt_tokens} tokens and max_tokens of {max_tokens} exceed its context of {context_length}"
    return Dropped(candidate, Drop.ROOM, f"{message}; the context of {to} holds both and is tried first")


# --- time to first token ----------------------------------------------------------------------------------------------
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
        """Whether this candidate answers before `other` can, as far as it was measured."""
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
    """Why `candidate` is tried after `later`: an attempt now would end before its answer. None if it keeps its place.

    A candidate is deferred only when one of `later` is known to be quicker, or is a cloud, which loads nothing.
    """
    message = too_slow(expected, allowed)
    if message is None:
        return None
    better = next(
        (other for other, prediction in later if not other.is_local or prediction.is_quicker_than(expected)), None
    )
    if better is None:
        return None
    return Dropped(candidate, Drop.TOO_SLOW, f"{message}; {better.name} is tried first", expected.wait_seconds)


def too_slow(expected: Prediction, allowed: Allowed) -> str | None:
    """Why an attempt would exceed `allowed`, with both numbers; None when it may be in time."""
    if expected.wait_seconds > allowed.wait_seconds:
        return (
            f"{expected}, and a candidate before the last may keep a request waiting {_seconds(allowed.wait_seconds)}"
        )
    if expected.seconds > allowed.first_token_seconds:
        return f"{expected}, and the deadline for it is in {_seconds(max(0.0, allowed.first_token_seconds))}"
    return None


def _seconds(amount: float) -> str:
    return f"{amount:.3g} s"
