"""The lifecycle of a model as a table, the backoff after failures, and why and how models leave.

A transition that is not in TABLE is illegal: `advance` raises and nothing changes. OFFLOADING, WARM and RESTORING
belong to the warm pool; a model may be unloaded in any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from inference.protocol import ModelState

FIRST_BACKOFF_SECONDS = 1.0
LAST_BACKOFF_SECONDS = 300.0


class ModelEvent(StrEnum):
    """Events of a model."""

    LOAD = "load"
    LOADED = "loaded"
    USED = "used"
    """the first request in flight"""
    IDLE = "idle"
    """the last request in flight ended"""
    DRAIN = "drain"
    STAY = "stay"
    """the reason to leave disappeared before the last answer was complete"""
    UNLOAD = "unload"
    """no request is in flight, or none waits for the load"""
    OFFLOAD = "offload"
    OFFLOADED = "offloaded"
    RESTORE = "restore"
    RESTORED = "restored"
    EXITED = "exited"
    """the worker has ended as requested"""
    FAIL = "fail"
    """the worker ended unexpectedly, or the load failed"""
    RETRY = "retry"
    """the backoff is over"""


_S, _E = ModelState, ModelEvent
TABLE: Mapping[tuple[ModelState, ModelEvent], ModelState] = {
    (_S.COLD, _E.LOAD): _S.LOADING,
    (_S.LOADING, _E.LOADED): _S.READY,
    (_S.LOADING, _E.UNLOAD): _S.UNLOADING,
    (_S.READY, _E.USED): _S.BUSY,
    (_S.BUSY, _E.IDLE): _S.READY,
    (_S.READY, _E.DRAIN): _S.DRAINING,
    (_S.BUSY, _E.DRAIN): _S.DRAINING,
    (_S.DRAINING, _E.STAY): _S.BUSY,
    (_S.DRAINING, _E.UNLOAD): _S.UNLOADING,
    (_S.DRAINING, _E.OFFLOAD): _S.OFFLOADING,
    (_S.OFFLOADING, _E.OFFLOADED): _S.WARM,
    (_S.OFFLOADING, _E.UNLOAD): _S.UNLOADING,
    (_S.WARM, _E.RESTORE): _S.RESTORING,
    (_S.WARM, _E.UNLOAD): _S.UNLOADING,
    (_S.RESTORING, _E.RESTORED): _S.READY,
    (_S.RESTORING, _E.UNLOAD): _S.UNLOADING,
    (_S.UNLOADING, _E.EXITED): _S.COLD,
    (_S.FAILED, _E.RETRY): _S.COLD,
    **{(state, _E.FAIL): _S.FAILED for state in _S if state is not _S.FAILED},
}

ACCEPTING = (_S.READY, _S.BUSY)
"""The states in which a loaded model takes requests."""
SERVING = (*ACCEPTING, _S.DRAINING)
"""The states in which a model may compute requests."""


class IllegalTransition(Exception):  # noqa: N818 - the usual name
    """The event does not belong to the state; nothing changed."""


def advance(state: ModelState, event: ModelEvent) -> ModelState:
    """The state after `event`; raises IllegalTransition."""
    try:
        return TABLE[state, event]
    except KeyError:
        raise IllegalTransition(f"a {state} model cannot {event}") from None


@dataclass(frozen=True, slots=True)
class Backoff:
    """The number of failures in a row, and the delay that follows: 1 s, doubled up to 300 s; reset by a success."""

    failures: int = 0

    def failed(self) -> Backoff:
        """One more failure."""
        return Backoff(self.failures + 1)

    def completed(self) -> Backoff:
        """A request was completed."""
        return Backoff() if self.failures else self

    @property
    def delay_seconds(self) -> float:
        """Rest after the last failure."""
        if not self.failures:
            return 0.0
        doublings = min(self.failures - 1, 16)
        return min(FIRST_BACKOFF_SECONDS * 2.0**doublings, LAST_BACKOFF_SECONDS)


# --- departures ------------------------------------------------------------------------------------------------------
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
    """or its file"""
    LOWERED = "a limit was lowered"
    """models use more memory than the new limit"""
    DEVICE = "device"
    """its device must be emptied, or is missing"""
    FEWER_REPLICAS = "fewer replicas are needed"
    REMOVED = "removed"
    """it was removed from the configuration"""

    @property
    def is_final(self) -> bool:
        """Whether the model must leave in any case. A move, for example, may end before the model has left."""
        return self not in (Reason.MEMORY_WANTED, Reason.IDLE, Reason.PRESSURE, Reason.MOVED)


@dataclass(frozen=True, slots=True)
class Departure:
    """Why and how a model leaves; `explanation` is the trace of the plan or another reason.

    `wanted_by`: the model whose load needs the memory, or empty.
    """

    reason: Reason
    action: Action = Action.UNLOAD
    explanation: tuple[str, ...] = ()
    wanted_by: str = ""

    def overrules(self, earlier: Departure) -> bool:
        """Whether this departure replaces an earlier one of the same model."""
        if not earlier.reason.is_final:
            return self.reason.is_final or self.reason is Reason.MOVED
        return self.reason.is_final and self.action is Action.UNLOAD


@dataclass(frozen=True, slots=True)
class Eviction:
    """The departure of a model. `memory_freed_mb`: released memory in MiB. `timestamp`: Unix seconds. `wanted_by`: see
    `Departure`.
    """

    model_name: str
    reason: Reason
    action: Action
    memory_freed_mb: float
    timestamp: float
    explanation: tuple[str, ...]
    wanted_by: str

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
