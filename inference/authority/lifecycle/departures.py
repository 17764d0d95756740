"""Reasons and actions of departures of models, and their records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Action(StrEnum):
    """What happens to a model that leaves."""

    UNLOAD = "unload"
    """becomes cold: its process ends"""
    OFFLOAD = "offload"
    """becomes warm: without device memory, but fast to restore"""


class Reason(StrEnum):
    """Why a model had to leave; the label of `inference_evictions_total`."""

    MEMORY_WANTED = "memory wanted"
    """another model needs its memory"""
    IDLE = "idle"
    PRESSURE = "pressure"
    """the device is too full"""
    OUTGREW = "outgrew"
    """it uses more memory than reserved, which does not fit"""
    BY_HAND = "by hand"
    MOVED = "moved"
    """it moves to another device"""
    CHANGED = "its configuration changed"
    LOWERED = "a limit was lowered"
    """models use more memory than the new limit"""
    DEVICE = "device"
    """its device must be emptied, or is missing"""
    REMOVED = "removed"
    """it was removed from the configuration"""

    @property
    def is_final(self) -> bool:
        """Whether the model must leave even if no other model needs its memory any more."""
        return self not in (Reason.MEMORY_WANTED, Reason.IDLE, Reason.PRESSURE)


@dataclass(frozen=True, slots=True)
class Departure:
    """Why and how a model leaves; `explanation` is the trace of the plan or another reason."""

    reason: Reason
    action: Action = Action.UNLOAD
    explanation: tuple[str, ...] = ()

    def overrules(self, earlier: Departure) -> bool:
        """Whether this departure replaces an earlier one of the same model."""
        if not self.reason.is_final:
            return False
        return not earlier.reason.is_final or self.action is Action.UNLOAD


@dataclass(frozen=True, slots=True)
class Eviction:
    """The departure of a model. `memory_freed_mb`: released memory in MiB. `timestamp`: Unix seconds."""

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
