"""Decides who may start, who waits and who is turned away at the gateway's door; never holds a request itself.

A higher class goes first, except that every FAIR_TURNth place goes to whoever has waited longest: so the longest waiter
starts after at most FAIR_TURN departures, and no class starves another. Times are monotonic seconds.
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

_MEMORY = 16
"""The mean duration follows the last so many requests."""

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


class Door(NamedTuple):
    """Who is inside since when, and who waits, in the order of arrival.

    `turns` places went to waiters so far; `mean_seconds` is how long requests take, once known.
    """

    running: Mapping[int, float] = MappingProxyType({})
    waiting: tuple[Waiter, ...] = ()
    turns: int = 0
    mean_seconds: float | None = None


class Why(StrEnum):
    """Why a request was turned away."""

    FULL = "full"
    LATE = "late"


class Admit(NamedTuple):
    """Request `number` may start."""

    number: int


@dataclass(frozen=True, slots=True)
class TurnAway:
    """Request `number` does not get in; in about `wait` seconds it would find room."""

    number: int
    why: Why
    wait: float = UNKNOWN_SECONDS


Effect = Admit | TurnAway


def walk_in(door: Door, bounds: Bounds, number: int, now: float) -> Door | None:
    """The door when a request that comes starts without being seen by anybody else; None when it cannot."""
    running, waiting, turns, mean_seconds = door
    if waiting or len(running) >= bounds.in_flight:
        return None
    return Door({**running, number: now}, (), turns, mean_seconds)


def arrive(
    door: Door, bounds: Bounds, number: int, priority: Priority, deadline: float, now: float
) -> tuple[Door, tuple[Effect, ...]]:
    """A request comes. It starts, waits, or is turned away; a full queue gives way from its lowest class only."""
    if (entered := walk_in(door, bounds, number, now)) is not None:
        return entered, (Admit(number),)
    waiter = Waiter(number, priority, deadline)
    if len(door.waiting) < bounds.queue:
        return door._replace(waiting=(*door.waiting, waiter)), ()
    wait = _room_in_queue(door, now)
    lowest = max(door.waiting, key=lambda other: (_RANK[other.priority], other.number), default=None)
    if lowest is None or _RANK[lowest.priority] <= _RANK[priority]:
        return door, (TurnAway(number, Why.FULL, wait),)
    others = tuple(other for other in door.waiting if other != lowest)
    return door._replace(waiting=(*others, waiter)), (TurnAway(lowest.number, Why.FULL, wait),)


def leave(door: Door, bounds: Bounds, number: int, now: float) -> tuple[Door, tuple[Effect, ...]]:
    """Request `number` ended, or stopped waiting; whoever is next may start. Unknown numbers change nothing."""
    since = door.running.get(number)
    if since is not None:
        took, mean = now - since, door.mean_seconds
        running = {**door.running}
        del running[number]
        door = Door(running, door.waiting, door.turns, took if mean is None else mean + (took - mean) / _MEMORY)
    elif door.waiting:
        door = door._replace(waiting=tuple(waiter for waiter in door.waiting if waiter.number != number))
    return _fill(door, bounds, now) if door.waiting else (door, ())


def expire(door: Door, bounds: Bounds, now: float) -> tuple[Door, tuple[Effect, ...]]:
    """Turns away everyone whose deadline has come."""
    late = tuple(waiter for waiter in door.waiting if waiter.deadline <= now)
    door = door._replace(waiting=tuple(waiter for waiter in door.waiting if waiter.deadline > now))
    # whoever comes again stands behind those who still wait
    wait = max(UNKNOWN_SECONDS, (len(door.waiting) + 1) * (door.mean_seconds or 0.0) / bounds.in_flight)
    return door, tuple(TurnAway(waiter.number, Why.LATE, wait) for waiter in late)


def resize(door: Door, bounds: Bounds, now: float) -> tuple[Door, tuple[Effect, ...]]:
    """New bounds: those who now have room start; nobody who runs or waits is turned away."""
    return _fill(door, bounds, now)


def next_deadline(door: Door) -> float | None:
    """When `expire` is due next, or None."""
    return min(waiter.deadline for waiter in door.waiting) if door.waiting else None


def _room_in_queue(door: Door, now: float) -> float:
    """In how many seconds the full queue has room: somebody inside ends, or somebody in it gives up."""
    ends = [expected_end(since, door.mean_seconds, now) for since in door.running.values()]
    gives_up = next_deadline(door)
    return min(ends if gives_up is None else [*ends, max(UNKNOWN_SECONDS, gives_up - now)])


def _fill(door: Door, bounds: Bounds, now: float) -> tuple[Door, tuple[Effect, ...]]:
    effects: list[Effect] = []
    while door.waiting and len(door.running) < bounds.in_flight:
        turns = door.turns + 1
        first = min(door.waiting, key=lambda waiter: (_RANK[waiter.priority], waiter.number))
        chosen = door.waiting[0] if turns % FAIR_TURN == 0 else first
        waiting = tuple(waiter for waiter in door.waiting if waiter != chosen)
        door = door._replace(running={**door.running, chosen.number: now}, waiting=waiting, turns=turns)
        effects.append(Admit(chosen.number))
    return door, tuple(effects)
