"""Why and how a model leaves its device, and the record that is kept of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


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
        """Whether the model has to leave even if no other model needs its room any more."""
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
