"""Keeps what a worker's silence and slowness are judged by, and leaves out time in which nobody here could listen.

Whoever stood still itself (a machine that was suspended, a process that was stopped, a loop that was held up) blames
nobody: that time counts neither as silence, nor as part of a load or of a step. `inference.workers.hang_detection`
judges.
"""

from __future__ import annotations

from collections import deque

from inference.workers.hang_detection import Life, Patience, Pause, without_pauses
from inference.workers.worker_link import Beat

TICK_SECONDS = 0.5
_MOST_PAUSES = 16


class Watch:
    """Of one worker, from `now` on; all times are seconds of one monotonic clock."""

    def __init__(self, patience: Patience, now: float) -> None:
        self._patience = patience
        self._began = self._heard = now
        self._due: float | None = now
        """Since when something is asked of it that takes time: to load, or to hold a file."""
        self._next_tick = now + TICK_SECONDS
        self._pauses: deque[Pause] = deque(maxlen=_MOST_PAUSES)

    @property
    def is_ready(self) -> bool:
        """Whether it has done what it was asked to."""
        return self._due is None

    def heard(self, now: float) -> None:
        """It said something."""
        self._heard = now

    def asked(self, now: float) -> None:
        """It was asked for something that takes time."""
        self._due = now

    def done(self) -> None:
        """It has done that."""
        self._due = None

    def tick(self, now: float) -> None:
        """To be called every TICK_SECONDS; what it is late is what we stood still."""
        late_seconds = now - self._next_tick
        self._next_tick = now + TICK_SECONDS
        if late_seconds <= TICK_SECONDS:
            return
        self._pauses.append(Pause(now, late_seconds))
        self._heard = now
        self._began += late_seconds
        if self._due is not None:
            self._due += late_seconds

    def complaint(self, now: float, beat: Beat | None, *, greeted: bool) -> str | None:
        """Why it counts as hung, or None."""
        step_seconds = beat.step_seconds if beat is not None else None
        life = Life(
            greeted=greeted,
            ready=self.is_ready,
            age_seconds=now - (self._began if self._due is None else self._due),
            silent_seconds=now - self._heard,
            step_seconds=None if step_seconds is None else without_pauses(step_seconds, self._heard, self._pauses),
            step_tokens=beat.step_tokens if beat else 0,
            first_step=beat is not None and beat.prompt_tokens == 0 and beat.generated_tokens == 0,
        )
        return self._patience.complaint(life)
