"""Alerts about memory, with the settings that would end them.

Each alert is a current condition that the recommended setting makes false, so that it disappears at the next check
after the setting was applied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headgate.shared.units import MIB, format_bytes
from inference.authority.pressure.levels import BAND, Bounds, Level
from inference.authority.pressure.relief import SAYS, Rung

SWAPS = 6
"""This many evictions of two models for each other within SWAP_SECONDS raise an alert."""
SWAP_SECONDS = 180.0
TURNED_AWAY = 5
"""This many rejections by a full queue within TURNED_AWAY_SECONDS raise an alert."""
TURNED_AWAY_SECONDS = 300.0
RESIDENCY_SECONDS = math.ceil(SWAP_SECONDS / (SWAPS - 1))
"""With this `min_residency` models evict each other less often than SWAPS times in SWAP_SECONDS."""


class Kind(StrEnum):
    """The kind of an alert."""

    PRESSURE = "pressure"
    """a device is at CRITICAL or above now"""
    FOREIGN_USE = "foreign_use"
    """other programs use more of a device than Headgate's share leaves"""
    THRASH = "thrash"
    """two models evict each other repeatedly"""
    REFUSED = "refused"
    """a requested model does not fit"""
    OUTGROWN = "outgrown"
    """a worker holds more memory than planned"""
    QUEUE_FULL = "queue_full"
    """requests are rejected by a full queue"""


@dataclass(frozen=True, slots=True)
class Change:
    """One setting and its value: `INFERENCE_NAME`, or `models.ID.name` of models.yaml."""

    setting: str
    value: str


@dataclass(frozen=True, slots=True)
class Alert:
    """One problem. `subject` is a device, a model or a priority. Without `changes`, no setting would end it."""

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
    """A device at `level`, with its use."""

    device: str
    level: Level
    rung: Rung
    used_bytes: int
    foreign_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Crowd:
    """A device that other programs filled recently. `peak_bytes` is their maximum, `budget_bytes` Headgate's share."""

    device: str
    peak_bytes: int
    budget_bytes: int
    total_bytes: int
    bounds: Bounds
    host: bool = False


@dataclass(frozen=True, slots=True)
class Swapping:
    """Two models that evicted each other `count` times within SWAP_SECONDS, and cannot be loaded together.

    With the settings `fix` of `models[1]` they could; `residency_seconds` is the shorter min_residency of the two.
    """

    models: tuple[str, str]
    count: int
    residency_seconds: float
    fix: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Misfit:
    """A recently requested model that does not fit now; with `changes` it would."""

    model: str
    reason: str
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Outgrown:
    """A worker that uses `grown_bytes` more than planned. `overhead_bytes` of the plan were overhead beyond llama.cpp's
    buffers; `configured_bytes` is the model's current memory_overhead.
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
    """The alerts for `facts`, in order."""
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
    """The recommended share is low enough for the level to fall, which needs a margin below its bound."""
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
        f"other programs used {format_bytes(fact.peak_bytes)} of {fact.device} recently, and Headgate may use "
        f"{format_bytes(fact.budget_bytes)}: together above the CRITICAL level of {format_bytes(fact.total_bytes)}",
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
        f"{fact.models[0]} and {fact.models[1]} evicted each other {fact.count} times in {SWAP_SECONDS:.0f} s",
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
    """The pair of models that evicted each other most often, from pairs (evicted, loaded instead); None without one."""
    counts: dict[tuple[str, str], list[int]] = {}
    for gone, newcomer in evicted:
        pair = (min(gone, newcomer), max(gone, newcomer))
        counts.setdefault(pair, [0, 0])[gone == pair[1]] += 1
    mutual = {pair: sum(ways) for pair, ways in counts.items() if all(ways)}
    if not mutual:
        return None
    return max(mutual.items(), key=lambda item: (item[1], item[0]))
