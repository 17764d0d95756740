"""What devices and requests looked like at the last checks: a ring of samples; remembers, and decides nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

MOST_SAMPLES = 1000
"""At a check every 15 s, more than four hours."""


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One device, in MiB of 2**20 bytes. `free_mb` is what nobody uses; `ours_mb` is booked for us, in any phase."""

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


class History:
    """The last MOST_SAMPLES samples, oldest first."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)

    def add(self, sample: Sample) -> None:
        """One more; the oldest goes when there are too many."""
        self._samples.append(sample)

    def since(self, timestamp: float) -> list[Sample]:
        """The samples that are not older than `timestamp`."""
        return [sample for sample in self._samples if sample.timestamp >= timestamp]
