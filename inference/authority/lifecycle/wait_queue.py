"""The queue of requests that wait for one model.

The order is requests that must run alone, then `high`, `normal` and `low`, in order of arrival within a priority. The
length is limited per priority, and every request has a deadline. Times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from inference.protocol import Priority

ORDER: tuple[Priority, ...] = (Priority.HIGH, Priority.NORMAL, Priority.LOW)


class QueueFullError(Exception):
    """The queue of this priority is full."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """One request that has waited since `arrived_at`; ids are not reused.

    `alone`: no other request may run beside it.
    """

    id: int
    priority: Priority
    deadline_at: float
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

    def join(self, waiter_id: int) -> WaitQueue:
        """The queue where this request need not run alone any more; it keeps its place."""
        waiters = (replace(other, alone=False) if other.id == waiter_id else other for other in self.waiters)
        return replace(self, waiters=tuple(waiters))

    def remove(self, waiter_id: int) -> WaitQueue:
        """The queue without this request; unchanged if it does not wait."""
        kept = tuple(waiter for waiter in self.waiters if waiter.id != waiter_id)
        return self if len(kept) == len(self.waiters) else replace(self, waiters=kept)

    def expire(self, now: float) -> tuple[WaitQueue, tuple[Waiter, ...]]:
        """The queue without requests whose deadline has passed, and these requests."""
        late = tuple(waiter for waiter in self.waiters if waiter.deadline_at <= now)
        if not late:
            return self, ()
        return replace(self, waiters=tuple(waiter for waiter in self.waiters if waiter.deadline_at > now)), late

    def position(self, waiter_id: int) -> int | None:
        """The number of requests before this one; None if it does not wait."""
        return next((index for index, waiter in enumerate(self.waiters) if waiter.id == waiter_id), None)

    def count(self, priority: Priority) -> int:
        """The number of waiting requests of this priority."""
        return sum(waiter.priority is priority for waiter in self.waiters)
