"""Shared by tests of breakers: the activity of a stream, and a breaker that is opened from outside."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pybreaker

from gateway.breaker.breakers import Breakers


@dataclass
class FakeActivity:
    """Silent for `seconds` now; the longest silence before was `longest_silence`."""

    seconds: float = 0.0
    longest_silence: float = 0.0

    def silent_seconds(self) -> float:
        """Seconds since the last sign of life."""
        return self.seconds


def open_breaker(breakers: Breakers, provider: str, model: str, seconds: float) -> None:
    """Opens a breaker of a running gateway in its storage, as another gateway with the same storage would."""
    storage = breakers.breaker(provider, model).storage
    storage.open_until = time.monotonic() + seconds
    storage.state = pybreaker.STATE_OPEN
