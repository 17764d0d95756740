"""Computes Retry-After of a rejected request from measurements.

    Retry-After = room + load + ahead x pace

`room`: seconds until the model that holds the memory ends its turn (0 if memory is free or the model is loading).
`load`: duration of the last load, or the rest of the running one. `ahead`: number of requests before this one. `pace`:
recent seconds per answer of the model, over all its sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_NEWEST_SHARE = 0.2
_LEAST_PROGRESS = 0.05
"""Share of a load below which its progress does not predict its duration."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Moving mean of the seconds between two answers while requests are in flight; None before the first."""

    seconds: float | None = None

    def answered(self, seconds: float) -> Pace:
        """The pace after one more answer, `seconds` after the last one or after the first request."""
        seconds = max(0.0, seconds)
        if self.seconds is None:
            return Pace(seconds)
        return Pace(self.seconds + _NEWEST_SHARE * (seconds - self.seconds))


def load_seconds_left(progress: float, took_seconds: float, last_seconds: float) -> float:
    """Seconds left of a load with `progress` (0 to 1) after `took_seconds`; the last load took `last_seconds`.

    An overdue load without progress is expected to take as long again as it is overdue.
    """
    if progress > _LEAST_PROGRESS:
        return took_seconds * (1 - progress) / progress
    return abs(last_seconds - took_seconds)


def expected_load_seconds(count: int, bytes_per_second: float | None) -> float:
    """Expected seconds of the first load of `count` bytes, at the rate of the service's last load; 1 s without one."""
    return max(0.1, count / bytes_per_second) if bytes_per_second else 1.0


def queue_seconds(ahead: int, places: int, pace: Pace) -> float | None:
    """Seconds until one of `places` is free for a request with `ahead` requests before it, running ones included.

    None if it has to wait and no pace was measured.
    """
    waits_for = ahead - places + 1
    if waits_for <= 0:
        return 0.0
    return None if pace.seconds is None else waits_for * pace.seconds


def retry_after_seconds(room: float, load: float, ahead: int = 0, pace: Pace | None = None) -> float:
    """Whole seconds, at least 1."""
    served = ahead * pace.seconds if pace is not None and pace.seconds is not None else 0.0
    return float(max(1, math.ceil(max(0.0, room) + max(0.0, load) + served)))
