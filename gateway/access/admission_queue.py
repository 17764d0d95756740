"""Decides which requests start, wait or are rejected.

A higher priority goes first, except that every FAIR_TURNth place goes to the request that has waited longest. So that
request starts after at most FAIR_TURN others, and no priority starves another. Times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from gateway.access.rate_limits import UNKNOWN_SECONDS, seconds_until_end
from inference.protocol import Priority

FAIR_TURN = 8

_MEAN_REQUESTS = 16
"""Number of requests over which the mean duration is smoothed."""

_RANK: Mapping[Priority, int] = {Priority.HIGH: 0, Priority.NORMAL: 1, Priority.LOW: 2}


@dataclass(frozen=True, slots=True)
class Bounds:
    """At most `in_flight` requests run and `queue` wait."""

    in_flight: int
    queue: int


@dataclass(frozen=True, slots=True)
class Waiter:
    """One request in the queue; `deadline` is when it stops waiting (monotonic seconds)."""

    number: int
    priority: Priority
    deadline: float


class RejectReason(StrEnum):
    """Why a request was rejected."""

    FULL = "full"
    LATE = "late"


class Admit(NamedTuple):
    """Request `number` may start."""

    number: int


@dataclass(frozen=True, slots=True)
class Reject:
    """Request `number` is rejected; a retry may succeed in about `wait` seconds."""

    number: int
    why: RejectReason
    wait: float = UNKNOWN_SECONDS


Effect = Admit | Reject


class AdmissionQueue:
    """The running requests with their start, and the waiting ones in the order of arrival."""

    def __init__(self, bounds: Bounds) -> None:
        self.running: dict[int, float] = {}
        self.waiting: list[Waiter] = []
        self.mean_seconds: float | None = None
        """The mean duration of requests, once known."""
        self._bounds = bounds
        self._turns = 0
        """Number of waiting requests that were started."""

    def arrive(self, number: int, priority: Priority, deadline: float, now: float) -> list[Effect]:
        """A request arrives: it starts, waits, or is rejected. A full queue drops a request of a lower priority."""
        if not self.waiting and len(self.running) < self._bounds.in_flight:
            self.running[number] = now
            return [Admit(number)]
        waiter = Waiter(number, priority, deadline)
        if len(self.waiting) < self._bounds.queue:
            self.waiting.append(waiter)
            return []
        wait = self._room_in_queue(now)
        lowest = max(self.waiting, key=lambda other: (_RANK[other.priority], other.number), default=None)
        if lowest is None or _RANK[lowest.priority] <= _RANK[priority]:
            return [Reject(number, RejectReason.FULL, wait)]
        self.waiting.remove(lowest)
        self.waiting.append(waiter)
        return [Reject(lowest.number, RejectReason.FULL, wait)]

    def leave(self, number: int, now: float) -> list[Effect]:
        """Request `number` ended or stopped waiting; the next one may start. Unknown numbers are ignored."""
        since = self.running.pop(number, None)
        if since is not None:
            took, mean = now - since, self.mean_seconds
            self.mean_seconds = took if mean is None else mean + (took - mean) / _MEAN_REQUESTS
        else:
            self.waiting = [waiter for waiter in self.waiting if waiter.number != number]
        return self._fill(now)

    def expire(self, now: float) -> list[Effect]:
        """Rejects all requests whose deadline has passed."""
        late = [waiter for waiter in self.waiting if waiter.deadline <= now]
        self.waiting = [waiter for waiter in self.waiting if waiter.deadline > now]
        # a retry queues behind the requests that still wait
        behind = (len(self.waiting) + 1) * (self.mean_seconds or 0.0) / self._bounds.in_flight
        return [Reject(waiter.number, RejectReason.LATE, max(UNKNOWN_SECONDS, behind)) for waiter in late]

    def resize(self, bounds: Bounds, now: float) -> list[Effect]:
        """Applies new bounds: waiting requests may start; none is rejected."""
        self._bounds = bounds
        return self._fill(now)

    @property
    def next_deadline(self) -> float | None:
        """When `expire` is due next, or None."""
        return min((waiter.deadline for waiter in self.waiting), default=None)

    def _room_in_queue(self, now: float) -> float:
        """Seconds until the full queue has room: a running request ends, or a waiting one reaches its deadline."""
        ends = [seconds_until_end(since, self.mean_seconds, now) for since in self.running.values()]
        next_expiry = self.next_deadline
        return min(ends if next_expiry is None else [*ends, max(UNKNOWN_SECONDS, next_expiry - now)])

    def _fill(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self.waiting and len(self.running) < self._bounds.in_flight:
            self._turns += 1
            first = min(self.waiting, key=lambda waiter: (_RANK[waiter.priority], waiter.number))
            chosen = self.waiting[0] if self._turns % FAIR_TURN == 0 else first
            self.waiting.remove(chosen)
            self.running[chosen.number] = now
            effects.append(Admit(chosen.number))
        return effects
