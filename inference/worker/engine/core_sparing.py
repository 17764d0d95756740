"""Decides whether the next decode step leaves one core to other programs, from the durations of earlier steps.

The threads of a step synchronize about sixty times. If one of them loses its core to another process, all of them wait,
and a step can take ten times as long as with one thread fewer. If all cores are free, every thread helps. So the policy
runs trials: some steps with one thread fewer are compared with the steps before them. There is no trial while the
kernel reports that no core was lost, and a spared core is taken back when it is idle.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

WINDOW = 8
"""Steps with and without a spared core that a trial compares."""

HOPELESS = 1.5
"""A trial with one thread fewer ends at once if a step takes this multiple of the usual time."""

SETTLING = 2
"""Steps after a change that are not measured: threads are created and caches filled."""

FIRST_PAUSE, LONGEST_PAUSE = 32, 2048
"""Steps between two trials; doubled after each trial without success."""

WORTH = 0.9
"""A trial succeeds if its steps take at most this part of the time."""

IDLE = 0.5
"""Idle cores from which a spared core is taken back."""

LOST = 0.1
"""Share of its computing time that a thread must have waited for a core before a trial begins."""

WORSE = 1.5
"""Steps that take this multiple of their time at the last trial start the next trial."""


@dataclass(slots=True)
class CoreSparing:
    """The state of the policy, changed in place after every step.

    `spared`: cores (0 or 1) left to other programs in the next step. `took`: seconds of the last steps of `rows`
    sequences. `before`: seconds of the steps before the running trial, empty without a trial.
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
    def is_due(self) -> bool:
        """Whether a trial may begin with the next step, because it is time for one."""
        return self.until_trial <= 1 and not self.spared and not self.before

    def observe(self, rows: int, seconds: float, idle: float | None = None, lost: float | None = None) -> None:
        """Records a step that computed one token of each of `rows` sequences in `seconds`.

        `idle`: cores that were idle meanwhile. `lost`: share of its time that a thread waited for a core. None means
        that it was not measured.
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
        """Starts again with another number of sequences: a running trial ends without a result."""
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
        is_slower = max(self.took) > limit and median(self.took) > limit  # the maximum is cheaper
        if is_slower or (self.until_trial == 0 and (lost is None or lost >= LOST)):
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
