"""Decides which requests start, wait or are rejected.

A higher priority goes first, except that every FAIR_TURNth place goes to the request that has waited longest. So that
request starts after at most FAIR_TURN others, and no priority starves another. Times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from gateway.access.rate_limits import UNKNOWN_SECONDS, expected_end
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


class QueueState(NamedTuple):
    """The running requests with their start, and the waiting ones in the order of arrival.

    `turns` counts the places that waiting requests got; `mean_seconds` is the mean duration of requests, once known.
    """

    running: Mapping[int, float] = MappingProxyType({})
    waiting: tuple[Waiter, ...] = ()
    turns: int = 0
    mean_seconds: float | None = None


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


def try_enter(state: QueueState, bounds: Bounds, number: int, now: float) -> QueueState | None:
    """The state after a new request starts at once; None when it cannot."""
    running, waiting, turns, mean_seconds = state
    if waiting or len(running) >= bounds.in_flight:
        return None
    return QueueState({**running, number: now}, (), turns, mean_seconds)


def arrive(
    state: QueueState, bounds: Bounds, number: int, priority: Priority, deadline: float, now: float
) -> tuple[QueueState, tuple[Effect, ...]]:
    """A request arrives: it starts, waits, or is rejected. A full queue drops a request of a lower priority for it."""
    if (entered := try_enter(state, bounds, number, now)) is not None:
        return entered, (Admit(number),)
    waiter = Waiter(number, priority, deadline)
    if len(state.waiting) < bounds.queue:
        return state._replace(waiting=(*state.waiting, waiter)), ()
    wait = _room_in_queue(state, now)
    lowest = max(state.waiting, key=lambda other: (_RANK[other.priority], other.number), default=None)
    if lowest is None or _RANK[lowest.priority] <= _RANK[priority]:
        return state, (Reject(number, RejectReason.FULL, wait),)
    others = tuple(other for other in state.waiting if other != lowest)
    return state._replace(waiting=(*others, waiter)), (Reject(lowest.number, RejectReason.FULL, wait),)


def leave(state: QueueState, bounds: Bounds, number: int, now: float) -> tuple[QueueState, tuple[Effect, ...]]:
    """Request `number` ended or stopped waiting; the next one may start. Unknown numbers change nothing."""
    since = state.running.get(number)
    if since is not None:
        took, mean = now - since, state.mean_seconds
        running = {**state.running}
        del running[number]
        state = QueueState(
            running, state.waiting, state.turns, took if mean is None else mean + (took - mean) / _MEAN_REQUESTS
        )
    elif state.waiting:
        state = state._replace(waiting=tuple(waiter for waiter in state.waiting if waiter.number != number))
    return _fill(state, bounds, now) if state.waiting else (state, ())


def expire(state: QueueState, bounds: Bounds, now: float) -> tuple[QueueState, tuple[Effect, ...]]:
    """Rejects all requests whose deadline has passed."""
    late = tuple(waiter for waiter in state.waiting if waiter.deadline <= now)
    state = state._replace(waiting=tuple(waiter for waiter in state.waiting if waiter.deadline > now))
    # a retry queues behind the requests that still wait
    wait = max(UNKNOWN_SECONDS, (len(state.waiting) + 1) * (state.mean_seconds or 0.0) / bounds.in_flight)
    return state, tuple(Reject(waiter.number, RejectReason.LATE, wait) for waiter in late)


def resize(state: QueueState, bounds: Bounds, now: float) -> tuple[QueueState, tuple[Effect, ...]]:
    """Applies new bounds: waiting requests may start; none is rejected."""
    return _fill(state, bounds, now)


def next_deadline(state: QueueState) -> float | None:
    """When `expire` is due next, or None."""
    return min(waiter.deadline for waiter in state.waiting) if state.waiting else None


def _room_in_queue(state: QueueState, now: float) -> float:
    """Seconds until the full queue has room: a running request ends, or a waiting one reaches its deadline."""
    ends = [expected_end(since, state.mean_seconds, now) for since in state.running.values()]
    next_expiry = next_deadline(state)
    return min(ends if next_expiry is None else [*ends, max(UNKNOWN_SECONDS, next_expiry - now)])


def _fill(state: QueueState, bounds: Bounds, now: float) -> tuple[QueueState, tuple[Effect, ...]]:
    effects: list[Effect] = []
    while state.waiting and len(state.running) < bounds.in_flight:
        turns = state.turns + 1
        first = min(state.waiting, key=lambda waiter: (_RANK[waiter.priority], waiter.number))
        chosen = state.waiting[0] if turns % FAIR_TURN == 0 else first
        waiting = tuple(waiter for waiter in state.waiting if waiter != chosen)
        state = state._replace(running={**state.running, chosen.number: now}, waiting=waiting, turns=turns)
        effects.append(Admit(chosen.number))
    return state, tuple(effects)
