"""Alerts about memory, with the settings that would end them.

Each alert is a current condition that the recommended setting makes false, so that it disappears at the next check
after the setting was applied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headgate.shared.units import MIB, format_bytes
from inference.authority.pressure.levels import BAND, Bounds, Level, Use
from inference.authority.pressure.relief import RESTRICTION_TEXTS, Restriction

SWAPS = 6
"""This many evictions of two models for each other within SWAP_SECONDS raise an alert."""
SWAP_SECONDS = 180.0
REJECTIONS = 5
"""This many rejections by a full queue within REJECTIONS_SECONDS raise an alert."""
REJECTIONS_SECONDS = 300.0
RESIDENCY_SECONDS = math.ceil(SWAP_SECONDS / (SWAPS - 1))
"""With this `min_residency` models evict each other less often than SWAPS times in SWAP_SECONDS."""


class Kind(StrEnum):
    """The kind of an alert."""

    PRESSURE = "pressure"
    """a device is at CRITICAL or above now, or is restricted"""
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


def changes_of(model: str, settings: Mapping[str, Any]) -> tuple[Change, ...]:
    """Settings of a model as changes."""
    return tuple(Change(f"models.{model}.{name}", str(value)) for name, value in settings.items())


def pressure_alert(use: Use, level: Level, restriction: Restriction) -> Alert | None:
    """The alert of a device that is too full."""
    if level < Level.CRITICAL and restriction is Restriction.NONE:
        return None
    held = f"; {RESTRICTION_TEXTS[restriction]}" if restriction else ""
    return Alert(Kind.PRESSURE, use.device, f"{use.device} is at {level}: {use.numbers}{held}")


def foreign_use_alert(
    device: str, peak_bytes: int, budget_bytes: int, total_bytes: int, bounds: Bounds, *, host: bool = False
) -> Alert | None:
    """The alert of a device that other programs filled recently.

    `peak_bytes` is their maximum, `budget_bytes` Headgate's share. The recommended share is low enough for the level to
    fall, which needs a margin below its bound.
    """
    if budget_bytes + peak_bytes <= bounds.critical * total_bytes:
        return None
    left = (bounds.critical - BAND) * total_bytes - peak_bytes
    changes: tuple[Change, ...] = ()
    if host and (percent := math.floor(left / total_bytes * 100)) > 0:
        changes = (Change("INFERENCE_CPU_MEMORY_MAX_PERCENT", f"{percent / 100:.2f}"),)
    elif not host and (mebibytes := math.floor(left / MIB)) > 0:
        changes = (Change("INFERENCE_GPU_MEMORY_LIMIT_MB", str(mebibytes)),)
    return Alert(
        Kind.FOREIGN_USE,
        device,
        f"other programs used {format_bytes(peak_bytes)} of {device} recently, and Headgate may use "
        f"{format_bytes(budget_bytes)}: together above the CRITICAL level ({bounds.critical:.0%} of "
        f"{format_bytes(total_bytes)})",
        changes,
    )


def swapping_alert(
    models: tuple[str, str], count: int, residency_seconds: float, fix: Mapping[str, Any]
) -> Alert | None:
    """The alert of two models that evicted each other `count` times within SWAP_SECONDS.

    With the settings `fix` of the second they could be loaded together. `residency_seconds` is the shorter
    min_residency of the two.
    """
    if count < SWAPS or residency_seconds >= RESIDENCY_SECONDS:
        return None
    changes = changes_of(models[1], fix) or tuple(
        Change(f"models.{model}.min_residency", f"{RESIDENCY_SECONDS}s") for model in models
    )
    message = f"{models[0]} and {models[1]} evicted each other {count} times in {SWAP_SECONDS:.0f} s"
    return Alert(Kind.THRASH, models[0], message, changes)


def outgrown_alert(
    model: str, grown_bytes: int, overhead_bytes: int | None, configured_bytes: int | None = None
) -> Alert | None:
    """The alert of a worker that uses `grown_bytes` more than planned.

    `overhead_bytes` of the plan were overhead beyond llama.cpp's buffers, None where memory_overhead has no effect;
    `configured_bytes` is the model's current memory_overhead.
    """
    message = f"the worker of {model} holds {format_bytes(grown_bytes)} more than was planned"
    if overhead_bytes is None:
        return Alert(Kind.OUTGROWN, model, message)
    wanted = math.ceil((overhead_bytes + grown_bytes) / MIB)
    if configured_bytes is not None and configured_bytes >= wanted * MIB:
        return None
    return Alert(Kind.OUTGROWN, model, message, (Change(f"models.{model}.memory_overhead", f"{wanted}MiB"),))


def queue_alert(priority: str, limit: int, count: int) -> Alert | None:
    """The alert of a queue that was full at its present `limit` for `count` requests within REJECTIONS_SECONDS."""
    if count < REJECTIONS:
        return None
    return Alert(
        Kind.QUEUE_FULL,
        priority,
        f"a full queue (limit {limit}) rejected {count} requests of {priority} priority in {REJECTIONS_SECONDS:.0f} s",
        (Change(f"INFERENCE_QUEUE_{priority.upper()}", str(limit + count)),),
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
