"""Decides how many attempts a tier takes at once just after it recovered; never counts them and never reads a clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

FIRST = 2
"""Attempts at once right after the recovery."""
STEP_SECONDS = 1.0
"""The width doubles so often."""
FULL = 64
"""From this width on everybody passes."""
LONGEST_SECONDS = 30.0
"""Everybody passes so long after the recovery, whatever happened since."""


@dataclass(frozen=True, slots=True)
class Ramp:
    """One recovery. `recovered` is when it was (monotonic seconds), `began` when the climb last began anew, `wins` the
    successes since then."""

    recovered: float
    began: float
    wins: int = 0


def begun(now: float) -> Ramp:
    """The ramp of a tier that recovered at `now`."""
    return Ramp(now, now)


def won(ramp: Ramp) -> Ramp:
    """One more attempt succeeded."""
    return replace(ramp, wins=ramp.wins + 1)


def lost(ramp: Ramp, now: float) -> Ramp:
    """An attempt failed: the climb begins anew."""
    return replace(ramp, began=now, wins=0)


def width(ramp: Ramp, now: float) -> int | None:
    """How many attempts may run at once at `now`; None: any number, and the ramp is over."""
    doublings = int((now - ramp.began) / STEP_SECONDS)
    if now - ramp.recovered >= LONGEST_SECONDS or doublings >= FULL.bit_length():
        return None
    wide = (FIRST << max(0, doublings)) + ramp.wins
    return None if wide >= FULL else wide
