"""Decides who may start, who waits and who is turned away at the gateway's door; never holds a request itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from inference.protocol import Priority

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


@dataclass(frozen=True, slots=True)
class Door:
    """Who is inside and who waits, in the order of arrival."""

    running: frozenset[int] = frozenset()
    waiting: tuple[Waiter, ...] = ()


class Why(StrEnum):
    """Why a request was turned away."""

    FULL = "full"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class Admit:
    """Request `number` may start."""

    number: int


@dataclass(frozen=True, slots=True)
class TurnAway:
    """Request `number` does not get in."""

    number: int
    why: Why


Effect = Admit | TurnAway


def arrive(
    door: Door, bounds: Bounds, number: int, priority: Priority, deadline: float
) -> tuple[Door, tuple[Effect, ...]]:
    """A request comes. It starts, waits, or is turned away; a full queue gives way from its lowest class only."""
    if len(door.running) < bounds.in_flight and not door.waiting:
        return replace(door, running=door.running | {number}), (Admit(number),)
    waiter = Waiter(number, priority, deadline)
    if len(door.waiting) < bounds.queue:
        return replace(door, waiting=(*door.waiting, waiter)), ()
    lowest = max(door.waiting, key=lambda other: (_RANK[other.priority], other.number), default=None)
    if lowest is None or _RANK[lowest.priority] <= _RANK[priority]:
        return door, (TurnAway(number, Why.FULL),)
    others = tuple(other for other in door.waiting if other != lowest)
    return replace(door, waiting=(*others, waiter)), (TurnAway(lowest.number, Why.FULL),)


def leave(door: Door, bounds: Bounds, number: int) -> tuple[Door, tuple[Effect, ...]]:
    """Request `number` ended, or stopped waiting; whoever is next may start. Unknown numbers change nothing."""
    door = Door(door.running - {number}, tuple(waiter for waiter in door.waiting if waiter.number != number))
    return _fill(door, bounds)


def expire(door: Door, now: float) -> tuple[Door, tuple[Effect, ...]]:
    """Turns away everyone whose deadline has come."""
    late = tuple(waiter for waiter in door.waiting if waiter.deadline <= now)
    kept = tuple(waiter for waiter in door.waiting if waiter.deadline > now)
    return replace(door, waiting=kept), tuple(TurnAway(waiter.number, Why.LATE) for waiter in late)


def resize(door: Door, bounds: Bounds) -> tuple[Door, tuple[Effect, ...]]:
    """New bounds: those who now have room start; nobody who runs or waits is turned away."""
    return _fill(door, bounds)


def next_deadline(door: Door) -> float | None:
    """When `expire` is due next, or None."""
    return min((waiter.deadline for waiter in door.waiting), default=None)


def _fill(door: Door, bounds: Bounds) -> tuple[Door, tuple[Effect, ...]]:
    effects: list[Effect] = []
    while door.waiting and len(door.running) < bounds.in_flight:
        chosen = min(door.waiting, key=lambda waiter: (_RANK[waiter.priority], waiter.number))
        waiting = tuple(waiter for waiter in door.waiting if waiter != chosen)
        door = Door(door.running | {chosen.number}, waiting)
        effects.append(Admit(chosen.number))
    return door, tuple(effects)
