"""Decides who waits for a model, who is served next and who is too late; never wakes anybody.

One queue per model: `high` before `normal` before `low`, first come first served within a class, each class bounded,
every waiter with a deadline. Before all of them stand those who must run alone. Times are seconds of one monotonic
clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from inference.protocol import Priority

ORDER: tuple[Priority, ...] = (Priority.HIGH, Priority.NORMAL, Priority.LOW)


class QueueFullError(Exception):
    """The class of this priority has no place left."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """One request that waits, since `asked_at`; `id` is unique among all that ever waited.

    `alone`: it must have the model to itself.
    """

    id: int
    priority: Priority
    deadline_at: float
    asked_at: float = 0.0
    alone: bool = False

    @property
    def rank(self) -> int:
        """Its class; the least is served first."""
        return -1 if self.alone else ORDER.index(self.priority)


@dataclass(frozen=True, slots=True)
class WaitQueue:
    """Those who wait, in the order they will be served."""

    waiters: tuple[Waiter, ...] = ()

    def __len__(self) -> int:
        return len(self.waiters)

    def push(self, waiter: Waiter, limits: Mapping[Priority, int] | None) -> WaitQueue:
        """Adds `waiter` behind its equals; raises QueueFullError when its class is full, ValueError for a known id.

        Without `limits` there is a place for everybody.
        """
        if any(other.id == waiter.id for other in self.waiters):
            raise ValueError(f"waiter {waiter.id} waits already")
        if limits is not None and self.count(waiter.priority) >= limits[waiter.priority]:
            raise QueueFullError(waiter.priority)
        at = next((index for index, other in enumerate(self.waiters) if other.rank > waiter.rank), len(self.waiters))
        return replace(self, waiters=(*self.waiters[:at], waiter, *self.waiters[at:]))

    def join(self, waiter_id: int) -> WaitQueue:
        """That waiter need not be alone any more; it keeps its place."""
        waiters = (replace(other, alone=False) if other.id == waiter_id else other for other in self.waiters)
        return replace(self, waiters=tuple(waiters))

    def remove(self, waiter_id: int) -> WaitQueue:
        """Without that waiter; unchanged when it does not wait."""
        kept = tuple(waiter for waiter in self.waiters if waiter.id != waiter_id)
        return self if len(kept) == len(self.waiters) else replace(self, waiters=kept)

    def expire(self, now: float) -> tuple[WaitQueue, tuple[Waiter, ...]]:
        """The queue without those whose deadline has passed, and them."""
        late = tuple(waiter for waiter in self.waiters if waiter.deadline_at <= now)
        if not late:
            return self, ()
        return replace(self, waiters=tuple(waiter for waiter in self.waiters if waiter.deadline_at > now)), late

    def position(self, waiter_id: int) -> int | None:
        """How many are served before this waiter, or None when it does not wait."""
        return next((index for index, waiter in enumerate(self.waiters) if waiter.id == waiter_id), None)

    def count(self, priority: Priority) -> int:
        """How many wait at this priority."""
        return sum(waiter.priority is priority for waiter in self.waiters)
