"""Decides how many prompt tokens a step may carry so that steps stay short; never reads a clock.

Decoding sequences wait for every step to end, and aborts and new requests are seen between steps. How many prompt
tokens fit into a tenth of a second differs by four orders of magnitude between machines, so it is learned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MIXED_SECONDS = 0.08
"""Aim for a step that also decodes: what a reader of a stream may notice as a pause."""

ALONE_SECONDS = 0.4
"""Aim for a step of prompts only: how late an abort or a new request may be seen."""

SMALLEST = 32
FIRST = 256


@dataclass(frozen=True, slots=True)
class Pace:
    """Tokens of prompts per step, beside decoding rows and without any; never above `most`."""

    most: int
    mixed: int
    alone: int

    @classmethod
    def first(cls, most: int) -> Pace:
        """Before anything was measured."""
        return cls(most, min(FIRST, most), min(FIRST, most))

    def budget(self, *, decoding: bool) -> int:
        """Tokens of prompts for the next step."""
        return self.mixed if decoding else self.alone

    def observe(self, prompt_tokens: int, seconds: float, *, decoding: bool) -> Pace:
        """The pace after a step. Steps that used less than half of their budget tell nothing and change nothing."""
        used = self.budget(decoding=decoding)
        if prompt_tokens * 2 < used:
            return self
        aim = MIXED_SECONDS if decoding else ALONE_SECONDS
        factor = min(2.0, max(0.5, aim / max(seconds, 1e-6)))
        size = min(self.most, max(min(SMALLEST, self.most), int(prompt_tokens * factor)))
        return replace(self, mixed=size) if decoding else replace(self, alone=size)
