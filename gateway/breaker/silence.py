"""Keeps at which stage attempts wait, and tells whether a tier has gone silent before they fail; reads no clock itself.

An attempt waits at one stage after the other: for the first byte, for the first word, for the rest of its answer. Where
it is silent for too long, and nobody has passed that stage since it came there, it speaks against the tier: who leads
others on is not gone. Times are monotonic seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

SILENT_SECONDS = 7.5
"""Who is silent for less says nothing, long before an attempt has failed of it."""

PATIENCE = 2.0
"""Behind the first byte silence may be thinking: so many times the longest of attempts that got on is allowed."""

KNOWN, REMEMBERED = 3, 16
"""Of how many attempts the longest is taken, at least and at most: with fewer nothing behind the head is judged."""


class Silent(Protocol):
    """What an attempt listens to."""

    longest_silence: float
    """The longest that was over with a sign of life, in seconds; begins anew with the first word."""

    def silent_seconds(self) -> float:
        """For how long there has been no sign of life; 0 while nobody listens."""
        ...


class _Stage:
    """Behind the first byte: who came here since anybody went on, and how long those were silent who did."""

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[float, Silent]] = {}
        self._silences: deque[float] = deque(maxlen=REMEMBERED)

    def passed(self, silent: Silent) -> None:
        """Somebody goes on."""
        self.waiting.clear()
        self._silences.append(silent.longest_silence)
        silent.longest_silence = 0.0

    def speaking(self, now: float) -> Iterator[bool]:
        """Of each attempt that came here long ago, whether it speaks against the tier."""
        if len(self._silences) >= KNOWN:
            allowed = max(SILENT_SECONDS, PATIENCE * max(self._silences))
            for since, silent in self.waiting.values():
                if now - since < allowed:
                    return  # nor do those who came later
                yield silent.silent_seconds() >= allowed


class Silence:
    """The attempts at one tier that run. Numbers are their permits'; one that is not known changes nothing."""

    def __init__(self, *, is_model: bool) -> None:
        """Behind the first byte only the attempts at one model are judged: others may think for longer."""
        self._stages = (_Stage(), _Stage()) if is_model else ()
        self._asked: dict[int, tuple[float, float]] = {}
        self._running: dict[int, Silent | None] = {}

    def asked(self, number: int, now: float, expires: float) -> None:
        """An attempt begins that is lost at `expires`."""
        self._asked[number] = now, expires
        self._running[number] = None

    def opened(self, number: int, now: float, silent: Silent) -> None:
        """Its first byte is here; `silent` tells the rest."""
        if number in self._running:
            self._asked.clear()
            self._running[number] = silent
            if self._stages:
                self._stages[0].waiting[number] = now, silent

    def begun(self, number: int, now: float) -> None:
        """Its first word is here."""
        if self._stages and (silent := self._running.get(number)) is not None:
            first, rest = self._stages
            first.passed(silent)
            rest.waiting[number] = now, silent

    def ended(self, number: int, *, whole: bool) -> None:
        """It waits no longer; `whole`: because it has its answer."""
        if number not in self._running:
            return
        silent = self._running.pop(number)
        self._asked.pop(number, None)
        for stage in self._stages:
            stage.waiting.pop(number, None)
        if whole:
            self._asked.clear()
            if self._stages and silent is not None:
                self._stages[-1].passed(silent)

    def clear(self) -> None:
        """Nothing that runs now speaks against the tier."""
        self._asked.clear()
        self._running.clear()
        for stage in self._stages:
            stage.waiting.clear()

    def speaking(self, now: float, enough: int) -> int:
        """How many attempts speak against the tier, counted up to `enough`."""
        found = 0
        for speaks in self._each(now):
            found += speaks
            if found >= enough:
                break
        return found

    def _each(self, now: float) -> Iterator[bool]:
        for since, expires in self._asked.values():
            if now - since < SILENT_SECONDS:
                break
            yield now < expires
        for stage in self._stages:
            yield from stage.speaking(now)
