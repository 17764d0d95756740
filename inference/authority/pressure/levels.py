"""Pressure levels of a device, with hysteresis.

The level follows from the use of the whole device, Headgate's and foreign, as a share of its total. As long as foreign
use does not grow, memory that the authority reserved raises the level at most to HIGH; otherwise a model that fills its
budget would be evicted right after its load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from headgate.shared.units import format_bytes

BAND = 0.02
"""A level falls only when the share is this far below its bound."""
FOREIGN_TOLERANCE = 0.01
"""Share of a device by which foreign use may vary without effect."""


class Level(IntEnum):
    """The pressure level; the numbers are those of `inference_pressure_level`."""

    LOW = 0
    MODERATE = 1
    HIGH = 2
    CRITICAL = 3
    EMERGENCY = 4

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Bounds:
    """The shares at which the levels begin (INFERENCE_PRESSURE_*), ascending."""

    moderate: float = 0.60
    high: float = 0.80
    critical: float = 0.90
    emergency: float = 0.98

    def of(self, level: Level) -> float:
        """The share at which `level` begins."""
        return (0.0, self.moderate, self.high, self.critical, self.emergency)[level]

    def level(self, share: float) -> Level:
        """The level of a share, without hysteresis."""
        return max(level for level in Level if share >= self.of(level))


@dataclass(frozen=True, slots=True)
class Use:
    """The use of a device: `ours_bytes` is booked in the ledger, `foreign_bytes` is used by other programs."""

    device: str
    total_bytes: int
    ours_bytes: int
    foreign_bytes: int

    @property
    def used_bytes(self) -> int:
        """The use by all programs."""
        return self.ours_bytes + self.foreign_bytes

    @property
    def numbers(self) -> str:
        """The use as text."""
        return (
            f"{format_bytes(self.used_bytes)} of {format_bytes(self.total_bytes)} are in use, "
            f"{format_bytes(self.foreign_bytes)} of it by other programs"
        )

    @property
    def share(self) -> float:
        """The use by all programs as a share of the total; 0 for a device without a size."""
        return self.used_bytes / self.total_bytes if self.total_bytes > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Gauge:
    """The result of the last check of a device, which the next check continues from.

    `accepted_bytes`: foreign use when memory was last reserved. `planned`: models have memory, and foreign
    use is not noticeably larger than that. `lowest_bytes`: the lowest foreign use since it last grew. Growth is
    measured from it, so slow growth is noticed.
    """

    level: Level = Level.LOW
    ours_bytes: int = 0
    accepted_bytes: int = 0
    lowest_bytes: int | None = None
    planned: bool = False


def with_accepted_use(gauge: Gauge, use: Use) -> Gauge:
    """The gauge after a reservation: the current foreign use is accepted, so it counts as planned."""
    return replace(gauge, ours_bytes=use.ours_bytes, accepted_bytes=use.foreign_bytes)


def with_forfeited(gauge: Gauge, foreign_bytes: int) -> Gauge:
    """The gauge after `foreign_bytes` of booked memory became foreign: no rise, because as much is in use as before."""
    lowest = None if gauge.lowest_bytes is None else gauge.lowest_bytes + foreign_bytes
    return replace(gauge, accepted_bytes=gauge.accepted_bytes + foreign_bytes, lowest_bytes=lowest)


def updated_gauge(gauge: Gauge, use: Use, bounds: Bounds) -> Gauge:
    """The gauge after a check. If Headgate booked more since the last check, the current foreign use is accepted."""
    accepted = use.foreign_bytes if use.ours_bytes > gauge.ours_bytes else gauge.accepted_bytes
    slack = 0.0 if gauge.level >= Level.CRITICAL else FOREIGN_TOLERANCE * use.total_bytes
    planned = use.ours_bytes > 0 and use.foreign_bytes <= accepted + slack
    level = max(bounds.level(use.share), min(gauge.level, bounds.level(use.share + BAND)))
    if planned and use.foreign_bytes < bounds.critical * use.total_bytes:
        level = min(level, Level.HIGH)
    lowest = use.foreign_bytes if gauge.lowest_bytes is None or grew(gauge, use) else gauge.lowest_bytes
    return Gauge(level, use.ours_bytes, accepted, min(lowest, use.foreign_bytes), planned)


def grew(gauge: Gauge, use: Use) -> bool:
    """Whether foreign use is noticeably larger than the lowest since it last grew."""
    return (
        gauge.lowest_bytes is not None and use.foreign_bytes > gauge.lowest_bytes + FOREIGN_TOLERANCE * use.total_bytes
    )
