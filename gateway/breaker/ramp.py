"""Limits the concurrent attempts at a tier just after it recovered."""

from __future__ import annotations

from dataclasses import dataclass, replace

FIRST = 2
"""Concurrent attempts right after the recovery."""
STEP_SECONDS = 1.0
"""The width doubles after each step."""
FULL = 64
"""From this width on there is no limit."""
LONGEST_SECONDS = 30.0
"""There is no limit this long after the recovery."""


@dataclass(frozen=True, slots=True)
class Ramp:
    """One recovery: when it was, when the ramp last began (monotonic seconds), and the successes since then."""

    recovered: float
    began: float
    wins: int = 0


def begun(now: float) -> Ramp:
    """The ramp of a tier that recovered at `now`."""
    return Ramp(now, now)


def won(ramp: Ramp) -> Ramp:
    """The ramp after one more success."""
    return replace(ramp, wins=ramp.wins + 1)


def lost(ramp: Ramp, now: float) -> Ramp:
    """The ramp after a failure: it begins again."""
    return replace(ramp, began=now, wins=0)


def width(ramp: Ramp, now: float) -> int | None:
    """The number of concurrent attempts at `now`; None when there is no limit and the ramp is over."""
    doublings = int((now - ramp.began) / STEP_SECONDS)
    if now - ramp.recovered >= LONGEST_SECONDS or doublings >= FULL.bit_length():
        return None
    wide = (FIRST << max(0, doublings)) + ramp.wins
    return None if wide >= FULL else wide
