"""Decides whether a step leaves one core to others, from how long steps took and whether others took it; never reads a
clock.

Threads that compute a step wait for each other some sixty times. One that lost its core, to another process or to our
own event loop, holds up all of them, and a step can take ten times as long as with one thread fewer. On quiet cores
every thread helps. Which is true changes from minute to minute, so both ways are tried, side by side in time, unless
the kernel says that nobody takes a core from us; and a core that was left to others is taken back when they leave it
idle.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class Crew:
    """`spared` cores (0 or 1) are left to others in the next step. `took` are the seconds of the last steps of `rows`
    sequences this way, `before` those of the way that a running trial is held against. Changed in place: it hears of
    every step.
    """

    spared: int = 0
    rows: int = 0
    took: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
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
        return self.until_trial <= 1 and not self.spared and not self.before

    def observe(self, rows: int, seconds: float, idle: float | None = None, lost: float | None = None) -> None:
        """After a step that computed one token of each of `rows` sequences in `seconds`. `idle` cores had nothing to do
        meanwhile, and a thread was without a core for the share `lost` of its time; None where that was not looked at.
        """
        if idle is not None and idle >= IDLE and self.spared and not self.before:
            self._change()
            self.rows, self.usual = rows, None
            self._wait_longer()
        elif rows != self.rows:
            self._begin(rows)
        elif self.before and self.spared and seconds > HOPELESS * median(self.before):
            self._judge(seconds)
        elif self.settling:
            self.settling -= 1
        else:
            self._compare(seconds, lost)

    def _begin(self, rows: int) -> None:
        """What was measured says nothing of steps of another size; a trial ends without a judgment."""
        if self.before:
            self._change()
        self.rows, self.usual, self.settling = rows, None, SETTLING
        self.before = ()
        self.took.clear()

    def _compare(self, seconds: float, lost: float | None) -> None:
        self.took.append(seconds)
        is_full = len(self.took) == WINDOW
        if self.before:
            if is_full:
                self._judge(median(self.took))
            return
        self.until_trial = max(0, self.until_trial - 1)
        if not is_full:
            return
        limit = math.inf if self.usual is None else WORSE * self.usual
        suffers = max(self.took) > limit and median(self.took) > limit  # the first alone is asked of most steps
        if suffers or (self.until_trial == 0 and (lost is None or lost >= LOST)):
            before = tuple(self.took)
            self._change()
            self.before = before
        elif self.until_trial == 0:
            self.usual, self.until_trial = median(self.took), self.pause

    def _change(self) -> None:
        self.spared, self.settling = 1 - self.spared, SETTLING
        self.took.clear()

    def _judge(self, other: float) -> None:
        known = median(self.before)
        self.before = ()
        if other <= WORTH * known:
            self.usual, self.pause, self.until_trial = other, FIRST_PAUSE, FIRST_PAUSE
        else:
            self._change()
            self.usual = known
            self._wait_longer()

    def _wait_longer(self) -> None:
        self.pause = self.until_trial = min(2 * self.pause, LONGEST_PAUSE)
