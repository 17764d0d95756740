"""Decides what an operator is told about memory, and which setting with which value ends it; applies none.

Facts in, alerts out. Every alert is a condition that the recommended setting makes false, not a memory of something
that happened: whoever applies the value sees the alert go with the next look.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headgate.shared.units import format_bytes
from inference.authority.pressure.levels import BAND, Bounds, Level
from inference.authority.pressure.relief import SAYS, Rung

MIB = 2**20
GIB = 2**30

SWAPS = 6
"""So many evictions for one another within SWAP_SECONDS are too many."""
SWAP_SECONDS = 180.0
TURNED_AWAY = 5
"""So many full queues within TURNED_AWAY_SECONDS are too many."""
TURNED_AWAY_SECONDS = 300.0
RESIDENCY_SECONDS = math.ceil(SWAP_SECONDS / (SWAPS - 1))
"""Models that stay so long after each use evict one another less often than SWAPS times in SWAP_SECONDS."""


class Kind(StrEnum):
    """What an alert is about."""

    PRESSURE = "pressure"
    """a device is at CRITICAL or above now"""
    FOREIGN_USE = "foreign_use"
    """others use more of a device than what may be ours leaves them"""
    THRASH = "thrash"
    """two models evict one another again and again"""
    REFUSED = "refused"
    """a model that was asked for does not fit"""
    OUTGROWN = "outgrown"
    """a worker holds more than was planned for it"""
    QUEUE_FULL = "queue_full"
    """requests are turned away because too many wait"""


@dataclass(frozen=True, slots=True)
class Change:
    """One setting and its value, as they are written: `INFERENCE_NAME`, or `models.ID.name` of models.yaml."""

    setting: str
    value: str


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing that is wrong. `subject` is a device, a model or a priority; no `changes`: no setting would end it."""

    kind: Kind
    subject: str
    message: str
    changes: tuple[Change, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As `/memory/stats` shows it."""
        return {"kind": str(self.kind), "subject": self.subject, "message": self.message}

    def recommendations(self) -> list[dict[str, Any]]:
        """Its changes, as `/memory/stats` shows them."""
        about = {"kind": str(self.kind), "subject": self.subject}
        return [{**about, "setting": change.setting, "value": change.value} for change in self.changes]


@dataclass(frozen=True, slots=True)
class Full:
    """A device at `level` now, of whose total so much is in use."""

    device: str
    level: Level
    rung: Rung
    used_bytes: int
    foreign_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Crowd:
    """A device that others filled lately: `peak_bytes` is the most that they used then, `budget_bytes` what may be ours
    now. `host`: it is host memory.
    """

    device: str
    peak_bytes: int
    budget_bytes: int
    total_bytes: int
    bounds: Bounds
    host: bool = False


@dataclass(frozen=True, slots=True)
class Swapping:
    """Two models that evicted one another `count` times within SWAP_SECONDS, and cannot be loaded together.

    `fix` are settings of `models[1]` with which they could; `residency_seconds` the shorter min_residency of the two.
    """

    models: tuple[str, str]
    count: int
    residency_seconds: float
    fix: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Misfit:
    """A model that was asked for lately and does not fit now, for this reason; `changes` were found to make it fit."""

    model: str
    reason: str
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Outgrown:
    """A worker that took `grown_bytes` more than planned, `overhead_bytes` of which were meant for what llama.cpp does
    not count; `configured_bytes` is the model's memory_overhead now.
    """

    model: str
    grown_bytes: int
    overhead_bytes: int
    configured_bytes: int | None


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """Requests of one priority that found the queue full at its present `limit`, within TURNED_AWAY_SECONDS."""

    priority: str
    limit: int
    count: int


Fact = Full | Crowd | Swapping | Misfit | Outgrown | TurnedAway


def advise(facts: Iterable[Fact]) -> tuple[Alert, ...]:
    """The alerts that the facts come to, in their order."""
    return tuple(alert for fact in facts if (alert := _alert(fact)) is not None)


def changes_of(model: str, settings: Mapping[str, Any]) -> tuple[Change, ...]:
    """Settings of a model as changes."""
    return tuple(Change(f"models.{model}.{name}", str(value)) for name, value in settings.items())


def _alert(fact: Fact) -> Alert | None:
    match fact:
        case Full():
            return _full(fact)
        case Crowd():
            return _crowd(fact)
        case Swapping():
            return _swapping(fact)
        case Misfit():
            return Alert(Kind.REFUSED, fact.model, f"{fact.model} does not fit: {fact.reason}", fact.changes)
        case Outgrown():
            return _outgrown(fact)
    return _turned_away(fact)


def _full(fact: Full) -> Alert | None:
    if fact.level < Level.CRITICAL and fact.rung is Rung.NONE:
        return None
    held = f"; {SAYS[fact.rung]}" if fact.rung else ""
    return Alert(
        Kind.PRESSURE,
        fact.device,
        f"{fact.device} is at {fact.level}: {format_bytes(fact.used_bytes)} of {format_bytes(fact.total_bytes)} are in "
        f"use, {format_bytes(fact.foreign_bytes)} of it by others{held}",
    )


def _crowd(fact: Crowd) -> Alert | None:
    """The recommended share leaves room for the level to fall: a level is left only so far below its bound."""
    if fact.budget_bytes + fact.peak_bytes <= fact.bounds.critical * fact.total_bytes:
        return None
    left = (fact.bounds.critical - BAND) * fact.total_bytes - fact.peak_bytes
    changes: tuple[Change, ...] = ()
    if fact.host and (percent := math.floor(left / fact.total_bytes * 100)) > 0:
        changes = (Change("INFERENCE_CPU_MEMORY_MAX_PERCENT", f"{percent / 100:.2f}"),)
    elif not fact.host and (mebibytes := math.floor(left / MIB)) > 0:
        changes = (Change("INFERENCE_GPU_MEMORY_LIMIT_MB", str(mebibytes)),)
    return Alert(
        Kind.FOREIGN_USE,
        fact.device,
        f"others used {format_bytes(fact.peak_bytes)} of {fact.device} lately, and {format_bytes(fact.budget_bytes)} "
        f"may be ours: together more than CRITICAL of its {format_bytes(fact.total_bytes)}",
        changes,
    )


def _swapping(fact: Swapping) -> Alert | None:
    if fact.count < SWAPS or fact.residency_seconds >= RESIDENCY_SECONDS:
        return None
    changes = changes_of(fact.models[1], fact.fix) or tuple(
        Change(f"models.{model}.min_residency", f"{RESIDENCY_SECONDS}s") for model in fact.models
    )
    return Alert(
        Kind.THRASH,
        fact.models[0],
        f"{fact.models[0]} and {fact.models[1]} made room for one another {fact.count} times in {SWAP_SECONDS:.0f} s",
        changes,
    )


def _outgrown(fact: Outgrown) -> Alert | None:
    wanted = math.ceil((fact.overhead_bytes + fact.grown_bytes) / MIB)
    if fact.configured_bytes is not None and fact.configured_bytes >= wanted * MIB:
        return None
    return Alert(
        Kind.OUTGROWN,
        fact.model,
        f"the worker of {fact.model} holds {format_bytes(fact.grown_bytes)} more than was planned",
        (Change(f"models.{fact.model}.memory_overhead", f"{wanted}MiB"),),
    )


def _turned_away(fact: TurnedAway) -> Alert | None:
    if fact.count < TURNED_AWAY:
        return None
    return Alert(
        Kind.QUEUE_FULL,
        fact.priority,
        f"{fact.count} requests of {fact.priority} priority found {fact.limit} waiting already in "
        f"{TURNED_AWAY_SECONDS:.0f} s",
        (Change(f"INFERENCE_QUEUE_{fact.priority.upper()}", str(fact.limit + fact.count)),),
    )


def swaps(evicted: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], int] | None:
    """The pair of models that evicted one another most often, of (evicted, for whom); both must have left for the
    other. None when no pair did.
    """
    counts: dict[tuple[str, str], list[int]] = {}
    for gone, newcomer in evicted:
        pair = (min(gone, newcomer), max(gone, newcomer))
        counts.setdefault(pair, [0, 0])[gone == pair[1]] += 1
    mutual = {pair: sum(ways) for pair, ways in counts.items() if all(ways)}
    if not mutual:
        return None
    return max(mutual.items(), key=lambda item: (item[1], item[0]))
