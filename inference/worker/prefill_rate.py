"""The prefill rate, estimated from the durations of steps.

Reused prefix tokens count as computed in no time, because the next prompt can expect reuse too. Steps with few prompt
tokens are ignored, because their duration depends on the step and not on the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_SECONDS = 20.0
"""Window of computing time; older measurements hardly count."""

LEAST_TOKENS = 32
"""Minimum number of prompt tokens of a step that counts."""


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """Prompt tokens and the seconds of their steps; older steps have less weight."""

    tokens: float = 0.0
    seconds: float = 0.0

    def read(self, tokens: int, seconds: float) -> PrefillRate:
        """The rate after a step of `seconds` with `tokens` prompt tokens, including reused ones."""
        if tokens < LEAST_TOKENS or seconds <= 0:
            return self
        kept = max(0.0, 1.0 - seconds / WINDOW_SECONDS)
        return PrefillRate(self.tokens * kept + tokens, self.seconds * kept + seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """The rate; None before the first step that counts."""
        return self.tokens / self.seconds if self.seconds else None


UNKNOWN = PrefillRate()
"""The rate before the first step."""
