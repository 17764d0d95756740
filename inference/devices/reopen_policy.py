"""Decides when a failed helper is restarted, and when further restarts are not expected to help.

The first restart is immediate, the next ones after 1 s, 2 s, 4 s and then every 8 s. Times are seconds of one clock.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SECONDS = 8.0
EXHAUSTED_AFTER = 5
"""After this number of consecutive new processes that the driver refused, further ones are not expected to help. With
the delays this takes at least 15 s, longer than the replacement of a driver.
"""


@dataclass(frozen=True, slots=True)
class Reopening:
    """Consecutive failures, consecutive new processes that the driver refused, and the time of the next restart."""

    failures: int = 0
    refused: int = 0
    due_at: float = 0.0

    @classmethod
    def renewed(cls) -> Reopening:
        """The state after the helper was ended on request, which is no refusal: a restart is due at once."""
        return cls(failures=1)

    def failed(self, now: float, *, is_refused: bool = False) -> Reopening:
        """Adds a failure. `is_refused`: the driver refused a new process."""
        doublings = min(self.failures - 1, 16)  # prevents an overflow after days of failures
        pause = min(MAX_SECONDS, 2.0**doublings) if self.failures else 0.0
        return Reopening(self.failures + 1, self.refused + 1 if is_refused else 0, now + pause)

    def is_due(self, now: float) -> bool:
        """Whether a restart is due."""
        return now >= self.due_at

    @property
    def is_exhausted(self) -> bool:
        """Whether new processes are not expected to help."""
        return self.refused >= EXHAUSTED_AFTER
