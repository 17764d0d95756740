"""Decides how many prompt tokens a step may hold, so that steps stay short.

Decoding sequences wait for each step, and aborts and new requests take effect between steps. The number of prompt
tokens per half second differs by four orders of magnitude between machines, so it is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

TOKEN_SECONDS = 0.002
"""The limits below apply to the *counted time* of prompt tokens: the measured time, but at most this for each token. So
steps of a slow model may be longer than the limits; its streams are slower anyway. Without this rule a slow model loses
a sixth of its throughput, because a step would hold less than one prompt."""

LARGEST_DISCOUNT = 6
"""The counted time is at least the measured time divided by this number."""

STEP_SECONDS = 0.4
"""The most time for prompts in a step while streams pause, as long as there is credit (CREDIT_SECONDS)."""

LONGEST_SECONDS = 1.0
"""Maximum time for prompts in a step. An abort or a new request waits at most this long.

If more prompts wait than streams decode, a step may take STEP_SECONDS times the ratio of both numbers: the streams
pause once, and all prompts start. If no stream has more than its first token, a step may take the maximum: requests
that arrived together wait for each other once."""

MIXED_SECONDS = 0.08
"""Average time for prompts in a step that also decodes; a reader of a stream notices a longer pause."""

CREDIT_SECONDS = 4.0
"""Total time above this average that prompts may take before streams catch up. Requests that arrive together are then
computed at once: a stream that pauses once ends earlier than a stream that is delayed at each token."""

DEBT_SECONDS = LONGEST_SECONDS / 2
"""How far the credit may fall below zero; the following steps repay it. A step that exceeds its budget by more
does so for a reason outside the scheduler, so only the measured pace is corrected."""

MIN_STEP_TOKENS = 32
"""Minimum prompt tokens of a step, even if they take longer; also the budget before the first measurement."""


def counted(tokens: int, seconds: float) -> float:
    """The counted time of `tokens` of prompts that took `seconds`."""
    return max(seconds / LARGEST_DISCOUNT, min(seconds, tokens * TOKEN_SECONDS))


def weight(decoding: int, prompts: int) -> float:
    """The weight of a second in which `decoding` streams wait for `prompts` prompts; it is lower for more prompts."""
    return min(1.0, decoding / max(1, prompts))


@dataclass(frozen=True, slots=True)
class Pace:
    """The measured pace: `tokens` prompt tokens have a counted time of STEP_SECONDS. A step has at most `max_tokens`.

    `credit_seconds`: how long streams may still be delayed beyond MIXED_SECONDS per step. If there are more prompts
    than streams, a second of delay uses up less of it (`weight`).

    If a token always takes the same time, steps stay within the limits: the estimate grows to at most its double per
    step and never beyond the pace of the last measured step. The time of a step is divided equally among prompt tokens
    and decoded tokens, although a decoded token costs more. A step that was too long corrects the estimate at once.
    """

    max_tokens: int
    tokens: int
    credit_seconds: float = CREDIT_SECONDS

    @classmethod
    def first(cls, max_tokens: int) -> Pace:
        """The pace before any measurement: MIN_STEP_TOKENS tokens per step."""
        return cls(max_tokens, int(MIN_STEP_TOKENS * STEP_SECONDS / LONGEST_SECONDS))

    def seconds(self, decoding: int, prompts: int, *, just_begun: bool = False) -> float:
        """The time for `prompts` prompts in the next step, beside `decoding` sequences.

        `just_begun`: no decoding sequence has more than its first token.
        """
        if not decoding:
            return LONGEST_SECONDS
        limit = LONGEST_SECONDS if just_begun else min(STEP_SECONDS * max(1.0, prompts / decoding), LONGEST_SECONDS)
        return min(limit, (MIXED_SECONDS + self.credit_seconds) / weight(decoding, prompts))

    def budget(self, seconds: float) -> int:
        """The number of prompt tokens of a step whose prompts may take `seconds`."""
        return min(self.max_tokens, max(MIN_STEP_TOKENS, int(self.tokens * seconds / STEP_SECONDS)))

    def observe(
        self, prompt_tokens: int, all_tokens: int, seconds: float, allowed: float, *, decoding: int, prompts: int
    ) -> Pace:
        """The pace after a step of `seconds`, whose prompts had a budget of `allowed` seconds of counted time.

        `decoding` and `prompts`: see the method `seconds`. A short step with less than half of its budget can only
        raise the estimate, because most of its time was not spent on prompts. A step without decoding sequences delays
        no stream, so the credit is full after it.
        """
        spent = counted(prompt_tokens, seconds * prompt_tokens / max(1, all_tokens))
        credit = CREDIT_SECONDS
        if decoding:
            delay = spent * weight(decoding, prompts)
            credit = min(CREDIT_SECONDS, max(-DEBT_SECONDS, self.credit_seconds + MIXED_SECONDS - delay))
        known = self if credit == self.credit_seconds else replace(self, credit_seconds=credit)
        if prompt_tokens == 0:
            return known
        fitting = prompt_tokens * STEP_SECONDS / max(spent, 1e-9)
        tokens = int(min(2 * max(self.tokens, prompt_tokens), fitting))
        was_short = spent <= max(allowed, MIXED_SECONDS)  # `allowed` may be 0 or less in debt
        if was_short and prompt_tokens * 2 < self.budget(allowed):
            tokens = max(self.tokens, tokens)
        return replace(known, tokens=tokens)
