"""Decides whether threads that compute a step spin while they wait for each other, from how long they were without a
core; reads no clock, and stops nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LOOK_SECONDS = 0.2
"""Of computing between two looks at what the kernel says."""

LONGEST_LOOK = 10.0
"""A look that took so many times what was computed in it says nothing: most of it was rest."""

LOST = 0.25
"""Cores that the threads of a step waited for on average, from which others want them. On two cores that nobody else
uses 0.03 with steps of 10 ms, and 0.1 with steps of 1 ms, which share them with our own event loops; 0.6 beside two
busy processes. Not measured on larger machines."""

CALM = 3
"""Looks in a row without others after which it is spun again."""


@dataclass(slots=True)
class Spinning:
    """`is_braked`: threads sleep at once instead of spinning. Changed in place: it hears of every step. `lost` is what
    the last look found, in cores.
    """

    is_braked: bool = False
    lost: float = 0.0
    computed: float = 0.0
    since: float | None = None
    waited: Mapping[int, float] = field(default_factory=dict)
    calm: int = 0

    def is_due(self, seconds: float) -> bool:
        """After a step of so many seconds: whether it is time for `look`."""
        self.computed += seconds
        return self.since is None or self.computed >= LOOK_SECONDS

    def look(self, now: float, waited: Mapping[int, float]) -> None:
        """`waited`: how many seconds each thread has been ready to run without a core, by its id, since it began; `now`
        in seconds. The first look, and one after a long rest, is what the next one is compared with.
        """
        is_whole = self.since is not None and now - self.since <= LONGEST_LOOK * self.computed
        if is_whole:
            known = waited.keys() & self.waited.keys()
            self._judge(sum(waited[thread] - self.waited[thread] for thread in known) / self.computed)
        self.since, self.waited, self.computed = now, waited, 0.0

    def _judge(self, lost: float) -> None:
        self.lost = lost
        self.calm = 0 if lost >= LOST else self.calm + 1
        self.is_braked = lost >= LOST or (self.is_braked and self.calm < CALM)
