"""Decides which state of a model follows which event, and how long a failing one waits; never skips a state.

Anything that is not in TABLE is illegal: `advance` raises and nothing changed. OFFLOADING, WARM and RESTORING are the
warm pool's; a model may be given up in any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from inference.protocol import ModelState

FIRST_BACKOFF_SECONDS = 1.0
LAST_BACKOFF_SECONDS = 300.0


class ModelEvent(StrEnum):
    """What can happen to a model."""

    LOAD = "load"
    LOADED = "loaded"
    USED = "used"
    """the first request in flight"""
    IDLE = "idle"
    """the last request in flight ended"""
    DRAIN = "drain"
    STAY = "stay"
    """the reason to leave is gone before the last answer was"""
    UNLOAD = "unload"
    """nothing is in flight any more, or nobody waits for it"""
    OFFLOAD = "offload"
    OFFLOADED = "offloaded"
    RESTORE = "restore"
    RESTORED = "restored"
    EXITED = "exited"
    """the worker that was asked to leave is gone"""
    FAIL = "fail"
    """the worker died, or the load failed"""
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


class IllegalTransition(Exception):  # noqa: N818 - the word of the field
    """The event does not belong to the state; nothing changed."""


def advance(state: ModelState, event: ModelEvent) -> ModelState:
    """The state after `event`; raises IllegalTransition."""
    try:
        return TABLE[state, event]
    except KeyError:
        raise IllegalTransition(f"a {state} model cannot {event}") from None


@dataclass(frozen=True, slots=True)
class Backoff:
    """How often in a row a model failed, and so how long it rests: 1 s, doubled to 300 s; forgotten by a success."""

    failures: int = 0

    def failed(self) -> Backoff:
        """One more failure."""
        return Backoff(self.failures + 1)

    def completed(self) -> Backoff:
        """A request was answered to its end."""
        return Backoff() if self.failures else self

    @property
    def delay_seconds(self) -> float:
        """Rest after the last failure."""
        if not self.failures:
            return 0.0
        doublings = min(self.failures - 1, 16)
        return min(FIRST_BACKOFF_SECONDS * 2.0**doublings, LAST_BACKOFF_SECONDS)
