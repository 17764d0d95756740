"""Keeps the rate at which prompts are read, from the steps that read them; measures no step itself.

The tokens that a prompt shares with an earlier one count as read in no time: they are part of what the next prompt may
expect too. Steps with few prompt tokens say how quick a step is, not a prompt, and are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_SECONDS = 20.0
"""Of computing: what was measured longer ago hardly counts."""

LEAST_TOKENS = 32
"""Prompt tokens of a step that is counted."""


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """Prompt tokens and the seconds of the steps that read them, older ones weighing less."""

    tokens: float = 0.0
    seconds: float = 0.0

    def read(self, tokens: int, seconds: float) -> PrefillRate:
        """After a step of `seconds` that read `tokens` of prompts, those that were there already included."""
        if tokens < LEAST_TOKENS or seconds <= 0:
            return self
        kept = max(0.0, 1.0 - seconds / WINDOW_SECONDS)
        return PrefillRate(self.tokens * kept + tokens, self.seconds * kept + seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """The rate, None before the first step that counts."""
        return self.tokens / self.seconds if self.seconds else None


UNKNOWN = PrefillRate()
"""Before the first step."""
