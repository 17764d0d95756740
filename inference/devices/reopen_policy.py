"""Decides when what failed is started afresh, and when that is known to be no help; starts nothing.

The first failure is followed by a fresh start at once, the next ones after 1 s, 2 s, 4 s and 8 s: so long at most is a
machine that is well again not seen. Times are seconds of one clock.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_SECONDS = 8.0
BEYOND_AFTER = 5
"""Fresh processes in a row that were refused before no fresh process is expected to help. By the pauses these take at
least 15 s, longer than a driver takes to be replaced and shorter than anybody likes to wait for a restart."""


@dataclass(frozen=True, slots=True)
class Reopening:
    """Failures in a row: all of them, and those of fresh processes that were refused; not before `due_at` again."""

    failures: int = 0
    refused: int = 0
    due_at: float = 0.0

    def failed(self, now: float, *, is_refused: bool = False) -> Reopening:
        """One more failure; `is_refused` when a fresh process was refused what no process was before."""
        doublings = min(self.failures - 1, 16)  # a device may be dead for days
        pause = min(MOST_SECONDS, 2.0**doublings) if self.failures else 0.0
        return Reopening(self.failures + 1, self.refused + 1 if is_refused else 0, now + pause)

    def is_due(self, now: float) -> bool:
        """Whether it may be started afresh."""
        return now >= self.due_at

    @property
    def is_beyond(self) -> bool:
        """Whether no fresh process is expected to help."""
        return self.refused >= BEYOND_AFTER
