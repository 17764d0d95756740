"""What devices and requests looked like at a check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One device, in MiB of 2**20 bytes. `free_mb` is unused; `ours_mb` is booked for us, in any phase."""

    used_mb: float
    free_mb: float
    foreign_mb: float
    ours_mb: float
    pressure_level: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One check. `timestamp` is Unix seconds.

    `pool_utilization`: of the sequences that all loaded models can compute at once, the share that is in use.
    """

    timestamp: float
    devices: Mapping[str, DeviceSample]
    active_requests: int
    queued_requests: int
    pool_utilization: float
    models_loaded: int
    models_warm: int

    def to_json(self) -> dict[str, Any]:
        """As `/memory/history` shows it."""
        return asdict(self)
