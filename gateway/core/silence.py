"""Tells from attempts that still wait whether a tier has gone silent; reads no clock, ends no attempt.

An attempt waits at one stage after the other: for the first byte, for the first word, for the rest of its answer. Where
it is silent for too long, and nobody has passed that stage since it came there, it speaks against the tier: who leads
others on is not gone. Times are monotonic seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

SILENT_SECONDS = 7.5
"""Who is silent for less says nothing, long before an attempt has failed of it."""

PATIENCE = 2.0
"""Behind the first byte silence may be thinking: so many times the longest that a recent first word took is allowed."""

KNOWN, REMEMBERED = 3, 16
"""Of how many first words the longest is taken, at least and at most: with fewer nothing behind the head is judged."""


class Stage(IntEnum):
    """How far an attempt has come."""

    ASKED = 0
    OPENED = 1
    BEGUN = 2


ASKED, OPENED, BEGUN = Stage


@dataclass(slots=True)
class _Waiting:
    """One attempt: since when it is at its stage, when it counts as lost, for how long it is silent now."""

    stage: Stage
    since: float
    expires: float
    silent_seconds: Callable[[], float] | None = None


class Silence:
    """The attempts at one tier that run. Numbers are their permits'; one that is not known changes nothing."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}
        self._passed = [-math.inf] * len(Stage)
        self._took: deque[float] = deque(maxlen=REMEMBERED)

    def asked(self, number: int, now: float, expires: float) -> None:
        """An attempt begins that is lost at `expires`."""
        self._waiting[number] = _Waiting(ASKED, now, expires)

    def opened(self, number: int, now: float, silent_seconds: Callable[[], float] | None = None) -> None:
        """Its first byte is here; from now on it says itself for how long it waits in vain."""
        if (attempt := self._waiting.get(number)) is not None:
            self._passes(ASKED, now)
            attempt.stage, attempt.since, attempt.silent_seconds = OPENED, now, silent_seconds

    def begun(self, number: int, now: float) -> None:
        """Its first word is here."""
        if (attempt := self._waiting.get(number)) is not None:
            self._passes(OPENED, now)
            if attempt.stage is OPENED:
                self._took.append(now - attempt.since)
            attempt.stage, attempt.since = BEGUN, now

    def ended(self, number: int, now: float, *, whole: bool) -> None:
        """It waits no longer; `whole`: because it has its answer."""
        if self._waiting.pop(number, None) is not None and whole:
            self._passes(BEGUN, now)

    def clear(self) -> None:
        """Nothing that runs now speaks against the tier."""
        self._waiting.clear()

    def _passes(self, stage: Stage, now: float) -> None:
        for passed in range(stage + 1):
            self._passed[passed] = now

    def speaking(self, now: float, enough: int) -> int:
        """How many attempts speak against the tier, counted up to `enough`."""
        if len(self._waiting) < enough:
            return 0
        thinking = max(SILENT_SECONDS, PATIENCE * max(self._took)) if len(self._took) >= KNOWN else math.inf
        found = 0
        for attempt in self._waiting.values():
            if attempt.since > self._passed[attempt.stage] and now < attempt.expires:
                silent = now - attempt.since if attempt.silent_seconds is None else attempt.silent_seconds()
                found += silent >= (SILENT_SECONDS if attempt.stage is ASKED else thinking)
                if found >= enough:
                    break
        return found
