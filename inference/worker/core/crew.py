"""Decides whether a step leaves one core to others, from how long steps took and whether others took it; never reads a
clock.

Threads that compute a step wait for each other some sixty times. One that lost its core, to another process or to our
own event loop, holds up all of them, and a step can take ten times as long as with one thread fewer. On quiet cores
every thread helps. Which is true changes from minute to minute, so both ways are tried, side by side in time, unless
the kernel says that nobody takes a core from us; and a core that was left to others is taken back when they leave it
idle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

WINDOW = 8
"""Steps that are compared with as many of the other way."""

HOPELESS = 1.5
"""A single step with a thread fewer that takes so many times what is usual ends its trial. The first steps with one
more say nothing: the thread has to be made."""

SETTLING = 2
"""Steps after a change that are not looked at: threads are made and caches filled."""

FIRST_PAUSE, LONGEST_PAUSE = 32, 2048
"""Steps between two trials: doubled by each that brought nothing."""

WORTH = 0.9
"""A change is made where the other way takes this part of the time, or less."""

IDLE = 0.5
"""Of a core: where so much lay idle while one was spared, nobody needs it."""

LOST = 0.1
"""Of the time in which a thread computes: where it was without a core for less, a thread fewer cannot be faster."""

WORSE = 1.5
"""Steps that take so many times what they took at the last trial are a reason for the next one."""


@dataclass(frozen=True, slots=True)
class Crew:
    """`spared` cores (0 or 1) are left to others in the next step. `took` are the seconds of the last steps of `rows`
    sequences this way, `before` those of the way that a running trial is held against.
    """

    spared: int = 0
    rows: int = 0
    took: tuple[float, ...] = ()
    before: tuple[float, ...] = ()
    usual: float | None = None
    settling: int = 0
    pause: int = FIRST_PAUSE
    until_trial: int = FIRST_PAUSE

    @property
    def is_trying(self) -> bool:
        """Whether the next step belongs to a trial."""
        return bool(self.before)

    @property
    def is_due(self) -> bool:
        """Whether a trial may begin with the next step, because it is time for one."""
        return not self.spared and not self.is_trying and self.until_trial <= 1

    def observe(self, rows: int, seconds: float, idle: float | None = None, lost: float | None = None) -> Crew:
        """After a step that computed one token of each of `rows` sequences in `seconds`. `idle` cores had nothing to do
        meanwhile, and a thread was without a core for the share `lost` of its time; None where that was not looked at.
        """
        if self.spared and not self.is_trying and idle is not None and idle >= IDLE:
            return replace(self._changed(), rows=rows, usual=None)._patient()
        if rows != self.rows:
            return self._other_load(rows)
        if self.is_trying and self.spared and seconds > HOPELESS * median(self.before):
            return self._judged(seconds)
        if self.settling:
            return replace(self, settling=self.settling - 1)
        took = (*self.took, seconds)[-WINDOW:]
        if self.is_trying:
            return replace(self, took=took) if len(took) < WINDOW else self._judged(median(took))
        waited = replace(self, took=took, until_trial=max(0, self.until_trial - 1))
        if len(took) < WINDOW:
            return waited
        suffers = self.usual is not None and median(took) > WORSE * self.usual
        if waited.until_trial == 0 and not suffers and lost is not None and lost < LOST:
            return replace(waited, usual=median(took), until_trial=self.pause)
        if waited.until_trial == 0 or suffers:
            return replace(self._changed(), before=took, until_trial=waited.until_trial)
        return waited

    def _other_load(self, rows: int) -> Crew:
        """What was measured says nothing of steps of another size; a trial ends without a judgment."""
        here = self._changed() if self.is_trying else self
        return replace(here, rows=rows, took=(), before=(), usual=None, settling=SETTLING)

    def _changed(self) -> Crew:
        return replace(self, spared=1 - self.spared, took=(), settling=SETTLING)

    def _judged(self, other: float) -> Crew:
        known = median(self.before)
        if other <= WORTH * known:
            return replace(self, before=(), usual=other, pause=FIRST_PAUSE, until_trial=FIRST_PAUSE)
        return replace(self._changed(), before=(), usual=known)._patient()

    def _patient(self) -> Crew:
        pause = min(2 * self.pause, LONGEST_PAUSE)
        return replace(self, pause=pause, until_trial=pause)
