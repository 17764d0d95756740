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
"""Where even these take longer than the aim they are taken all the same; also where learning begins."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Tokens of prompts per step, beside decoding rows and without any; never above `most`.

    With costs that stay as they are, a step takes no longer than its aim: the budget never grows beyond what the step
    measured last would have fitted into it, and at most doubles. One that was too long corrects it at once.
    """

    most: int
    mixed: int
    alone: int

    @classmethod
    def first(cls, most: int) -> Pace:
        """Before anything was measured."""
        return cls(most, min(SMALLEST, most), min(SMALLEST, most))

    def budget(self, *, decoding: bool) -> int:
        """Tokens of prompts for the next step."""
        return self.mixed if decoding else self.alone

    def observe(self, prompt_tokens: int, seconds: float, *, decoding: bool) -> Pace:
        """The pace after a step. A short step that used less than half of its budget tells nothing."""
        used = self.budget(decoding=decoding)
        aim = MIXED_SECONDS if decoding else ALONE_SECONDS
        if prompt_tokens == 0 or (prompt_tokens * 2 < used and seconds <= aim):
            return self
        size = int(prompt_tokens * min(2.0, aim / max(seconds, 1e-6)))
        size = min(self.most, max(SMALLEST, size))
        return replace(self, mixed=size) if decoding else replace(self, alone=size)
