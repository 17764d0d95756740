"""What became of every model that had to leave: why, how, and how much memory came back; decides about none of it.

A record is made when the memory is back, so that its bytes are what the ledger got and not what was hoped for. The last
MOST_RECORDS are kept; the counts are of all since the service began.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from inference.api.event_bus import Bus
from inference.api.inference_metrics import Metrics

MOST_RECORDS = 1000
MIB = 2**20


class Action(StrEnum):
    """What a model that leaves becomes."""

    UNLOAD = "unload"
    """cold: its process ends"""
    OFFLOAD = "offload"
    """warm: no device memory, but quick to come back"""


class Reason(StrEnum):
    """Why a model had to leave; the label of `inference_evictions_total`."""

    MEMORY_WANTED = "memory wanted"
    """another model needs the room"""
    IDLE = "idle"
    PRESSURE = "pressure"
    """the device is too full, of ours or of others'"""
    OUTGREW = "outgrew"
    """it holds more than was reserved for it, and that does not fit"""
    BY_HAND = "by hand"
    MOVED = "moved"
    """it goes to another device"""
    CHANGED = "its configuration changed"
    LOWERED = "a limit was lowered"
    """models hold more than they may from now on"""
    DEVICE = "device"
    """its device has to be emptied, or is not there"""
    REMOVED = "removed"
    """it is not in the configuration any more"""

    @property
    def is_final(self) -> bool:
        """Whether the model has to leave whatever becomes of those who wait for its room."""
        return self not in (Reason.MEMORY_WANTED, Reason.IDLE, Reason.PRESSURE)


@dataclass(frozen=True, slots=True)
class Departure:
    """Why and how a model leaves; `explanation` is the plan's trace, or whatever else led to it."""

    reason: Reason
    action: Action = Action.UNLOAD
    explanation: tuple[str, ...] = ()

    def overrules(self, earlier: Departure) -> bool:
        """Whether a model that leaves already leaves for this instead."""
        if not self.reason.is_final:
            return False
        return not earlier.reason.is_final or self.action is Action.UNLOAD


@dataclass(frozen=True, slots=True)
class Eviction:
    """A model that left. `memory_freed_mb` is MiB that the ledger got back, `timestamp` Unix seconds."""

    model_name: str
    reason: Reason
    action: Action
    memory_freed_mb: float
    timestamp: float
    explanation: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As `/memory/evictions` and `/events` show it."""
        return {
            "model_name": self.model_name,
            "reason": str(self.reason),
            "action": str(self.action),
            "memory_freed_mb": self.memory_freed_mb,
            "timestamp": self.timestamp,
            "explanation": list(self.explanation),
        }


class Evictions:
    """The last records, oldest first, and how many there were of each action (`totals`)."""

    def __init__(self, metrics: Metrics, bus: Bus, clock: Callable[[], float] = time.time) -> None:
        self._metrics = metrics
        self._bus = bus
        self._clock = clock
        self.records: deque[Eviction] = deque(maxlen=MOST_RECORDS)
        self.totals: Counter[Action] = Counter()
        self._awaited: dict[str, list[asyncio.Future[Eviction]]] = {}

    def next_of(self, model: str) -> asyncio.Future[Eviction]:
        """Done with the next record of `model`; whoever waits for it bounds the wait."""
        future: asyncio.Future[Eviction] = asyncio.get_running_loop().create_future()
        self._awaited.setdefault(model, []).append(future)
        return future

    def add(self, model: str, departure: Departure, freed_bytes: int) -> Eviction:
        """One model has left and `freed_bytes` are back: recorded, counted, told."""
        record = Eviction(
            model, departure.reason, departure.action, round(freed_bytes / MIB, 3), self._clock(), departure.explanation
        )
        self.records.append(record)
        self.totals[departure.action] += 1
        self._metrics.evictions.labels(str(departure.action), str(departure.reason)).inc()
        self._bus.publish("eviction", {"eviction": record.to_json()})
        for future in self._awaited.pop(model, ()):
            if not future.done():
                future.set_result(record)
        return record
