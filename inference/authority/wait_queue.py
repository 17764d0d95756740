"""The queue of requests that wait for one model, and how long they will wait.

The order is requests that must run alone, then `high`, `normal` and `low`, in order of arrival within a priority. The
length is limited per priority. Times are monotonic seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from inference.protocol import Priority

ORDER: tuple[Priority, ...] = (Priority.HIGH, Priority.NORMAL, Priority.LOW)
_NEWEST_SHARE = 0.2
_MIN_PROGRESS = 0.05
"""Share of a load below which its progress does not predict its duration."""


class QueueFullError(Exception):
    """The queue of this priority is full."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """One request that has waited since `arrived_at`; ids are not reused.

    `alone`: no other request may run beside it.
    """

    id: int
    priority: Priority
    arrived_at: float = 0.0
    alone: bool = False

    @property
    def rank(self) -> int:
        """Its rank in the queue; the lowest is served first."""
        return -1 if self.alone else ORDER.index(self.priority)


@dataclass(frozen=True, slots=True)
class WaitQueue:
    """The waiting requests in the order of service."""

    waiters: tuple[Waiter, ...] = ()

    def __len__(self) -> int:
        return len(self.waiters)

    def push(self, waiter: Waiter, limits: Mapping[Priority, int] | None) -> WaitQueue:
        """Adds `waiter` after those of equal rank; raises QueueFullError for a full queue, ValueError for a known id.

        Without `limits` the length is not limited.
        """
        if any(other.id == waiter.id for other in self.waiters):
            raise ValueError(f"waiter {waiter.id} is already in the queue")
        if limits is not None and self.count(waiter.priority) >= limits[waiter.priority]:
            raise QueueFullError(waiter.priority)
        at = next((index for index, other in enumerate(self.waiters) if other.rank > waiter.rank), len(self.waiters))
        return replace(self, waiters=(*self.waiters[:at], waiter, *self.waiters[at:]))

    def clear_alone(self, waiter_id: int) -> WaitQueue:
        """The queue where this request need not run alone any more; it keeps its place."""
        waiters = (replace(other, alone=False) if other.id == waiter_id else other for other in self.waiters)
        return replace(self, waiters=tuple(waiters))

    def remove(self, waiter_id: int) -> WaitQueue:
        """The queue without this request; unchanged if it does not wait."""
        kept = tuple(waiter for waiter in self.waiters if waiter.id != waiter_id)
        return self if len(kept) == len(self.waiters) else replace(self, waiters=kept)

    def position(self, waiter_id: int) -> int | None:
        """The number of requests before this one; None if it does not wait."""
        return next((index for index, waiter in enumerate(self.waiters) if waiter.id == waiter_id), None)

    def count(self, priority: Priority) -> int:
        """The number of waiting requests of this priority."""
        return sum(waiter.priority is priority for waiter in self.waiters)


# --- expected waits --------------------------------------------------------------------------------------------------
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

    If a load without progress is overdue by some seconds, the result is this number of seconds.
    """
    if progress > _MIN_PROGRESS:
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
    """Whole seconds, at least 1, until there is room, the model is loaded and `ahead` requests are answered."""
    served = ahead * pace.seconds if pace is not None and pace.seconds is not None else 0.0
    return float(max(1, math.ceil(max(0.0, room) + max(0.0, load) + served)))
