"""The clock of the authority. Tests pass one that they move forward themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Alarm(Protocol):
    """A scheduled call."""

    def cancel(self) -> None:
        """Cancels the call."""
        ...


class Clock:
    """The clock of the event loop."""

    def now(self) -> float:
        """Monotonic seconds."""
        return asyncio.get_running_loop().time()

    def unix(self) -> float:
        """Unix seconds."""
        return time.time()

    def call_at(self, at: float, callback: Callable[[], object]) -> Alarm:
        """Calls `callback` when `now()` reaches `at`."""
        return asyncio.get_running_loop().call_at(at, callback)
