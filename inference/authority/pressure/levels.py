"""Decides how full a device is, in levels that do not flap; never decides what follows from one.

The level comes from the use of the whole device, ours and others', as a share of its total. What the authority admitted
itself, knowing what others used at that moment, is a plan and no distress: such use is HIGH at most, until others take
more than they had then. Without this a model that fills its budget would be evicted for having been loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

BAND = 0.02
"""A level is left downwards only when the share is so far below its bound."""
WOBBLE = 0.01
"""Share of a device by which the use of others may vary without meaning anything."""


class Level(IntEnum):
    """How full a device is; the numbers are those of `inference_pressure_level`."""

    LOW = 0
    MODERATE = 1
    HIGH = 2
    CRITICAL = 3
    EMERGENCY = 4

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Bounds:
    """Shares from which the levels begin (INFERENCE_PRESSURE_*); they rise."""

    moderate: float = 0.60
    high: float = 0.80
    critical: float = 0.90
    emergency: float = 0.98

    def of(self, level: Level) -> float:
        """Where `level` begins."""
        return (0.0, self.moderate, self.high, self.critical, self.emergency)[level]

    def level(self, share: float) -> Level:
        """The level that a share alone means."""
        return max(level for level in Level if share >= self.of(level))


@dataclass(frozen=True, slots=True)
class Use:
    """A device in bytes: `ours_bytes` is booked for us in whatever phase, `foreign_bytes` is what others use."""

    device: str
    total_bytes: int
    ours_bytes: int
    foreign_bytes: int

    @property
    def used_bytes(self) -> int:
        """Everybody's use."""
        return self.ours_bytes + self.foreign_bytes

    @property
    def share(self) -> float:
        """Everybody's use of the total; 0 for a device without a size."""
        return self.used_bytes / self.total_bytes if self.total_bytes > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Gauge:
    """What is remembered of a device from one look to the next.

    `admitted_bytes` is what others used when we last booked more; `planned`: they use no more than that now.
    `mark_bytes` is their least use since it was last found grown, so that a slow growth adds up.
    """

    level: Level = Level.LOW
    ours_bytes: int = 0
    admitted_bytes: int = 0
    mark_bytes: int | None = None
    planned: bool = False


def admit(gauge: Gauge, use: Use) -> Gauge:
    """The gauge after something of ours was booked with the device in this use: that use is planned from now on."""
    return replace(gauge, ours_bytes=use.ours_bytes, admitted_bytes=use.foreign_bytes)


def settle(gauge: Gauge, use: Use, bounds: Bounds) -> Gauge:
    """The gauge after a look at the device. More of ours than was known counts as admitted."""
    admitted = use.foreign_bytes if use.ours_bytes > gauge.ours_bytes else gauge.admitted_bytes
    slack = 0.0 if gauge.level >= Level.CRITICAL else WOBBLE * use.total_bytes
    planned = use.ours_bytes > 0 and use.foreign_bytes <= admitted + slack
    level = max(bounds.level(use.share), min(gauge.level, bounds.level(use.share + BAND)))
    if planned and use.foreign_bytes < bounds.critical * use.total_bytes:
        level = min(level, Level.HIGH)
    mark = use.foreign_bytes if gauge.mark_bytes is None or grew(gauge, use) else gauge.mark_bytes
    return Gauge(level, use.ours_bytes, admitted, min(mark, use.foreign_bytes), planned)


def grew(gauge: Gauge, use: Use) -> bool:
    """Whether others use noticeably more than at the last look; nothing is known before the first."""
    return gauge.mark_bytes is not None and use.foreign_bytes > gauge.mark_bytes + WOBBLE * use.total_bytes
