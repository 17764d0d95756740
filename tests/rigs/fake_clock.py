"""A clock for the authority that a test moves forward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from inference.authority.clock import Clock

ITERATIONS = 10
"""Iterations of the event loop after each alarm, in which its effects report back."""


class FakeAlarm:
    """A call at a time of the fake clock."""

    def __init__(self, clock: FakeClock, at: float, callback: Callable[[], object]) -> None:
        self.at = at
        self._clock = clock
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        """Rings when the clock of the loop gets there."""
        self._stop()
        self._handle = asyncio.get_running_loop().call_at(self.at - self._clock.ahead_seconds, self.ring)

    def ring(self) -> None:
        """Makes the call."""
        self.cancel()
        self._callback()

    def cancel(self) -> None:
        self._stop()
        self._clock.alarms.discard(self)

    def _stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


class FakeClock(Clock):
    """Runs with the event loop, and ahead of it by what the test has advanced."""

    def __init__(self) -> None:
        self.ahead_seconds = 0.0
        self.alarms: set[FakeAlarm] = set()

    def now(self) -> float:
        return super().now() + self.ahead_seconds

    def unix(self) -> float:
        return super().unix() + self.ahead_seconds

    def call_at(self, at: float, callback: Callable[[], object]) -> FakeAlarm:
        alarm = FakeAlarm(self, at, callback)
        self.alarms.add(alarm)
        alarm.arm()
        return alarm

    async def advance(self, seconds: float) -> None:
        """Lets `seconds` pass: alarms that fall due ring in order, each at its time."""
        end = self.now() + seconds
        while due := [alarm for alarm in self.alarms if alarm.at <= end]:
            first = min(due, key=lambda alarm: alarm.at)
            self._set(first.at)
            first.ring()
            for _ in range(ITERATIONS):
                await asyncio.sleep(0)
        self._set(end)
        for alarm in self.alarms:
            alarm.arm()

    def _set(self, to: float) -> None:
        self.ahead_seconds += max(0.0, to - self.now())
