"""Which requests of a model are suspected of ending its worker, and which are rejected.

After an abort or an out-of-memory error all requests in flight become suspects and run alone. A suspect that completes
is cleared. A request that ends a worker while it runs alone is confirmed as a poison request and rejected; an abort
without a message may be a signal from outside, so two of them are needed. Out-of-memory errors confirm nothing, because
they depend on other requests. When several requests in a row are confirmed and none completes, the model is at fault,
and no request is confirmed until one completes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from inference.protocol import ExitCause

SUSPICIOUS = frozenset({ExitCause.ASSERT, ExitCause.OOM_COMPUTE})
"""Exit causes that a request may be responsible for. A kill comes from outside, a lost device from the device."""
SUSPECT_SECONDS = 900.0
CONFIRMED_SECONDS = 3600.0
MAX_CASES = 256
"""Limit per model; the oldest cases are removed."""
MAX_IN_A_ROW = 3
"""After this many confirmed requests without a completed one the model is assumed to be at fault."""


class Suspicion(StrEnum):
    """How strongly a request is suspected of ending its worker. `GET /quarantine` shows these values."""

    NONE = "none"
    SUSPECT = "suspect"
    """was in flight when the worker ended; runs alone"""
    STRONG = "strong"
    """ran alone once when the worker ended without a message; runs alone again"""
    CONFIRMED = "confirmed"
    """is rejected"""


class CrashKind(StrEnum):
    """How a worker ended, as evidence against one of its requests."""

    CRASHED = "crashed"
    """other requests were running, or memory ran out"""
    CRASHED_ALONE = "crashed_alone"
    CRASHED_UNEXPLAINED = "crashed_unexplained"
    """alone, by an abort without a message"""


_S, _E = Suspicion, CrashKind
TABLE: Mapping[tuple[Suspicion, CrashKind], Suspicion] = {
    (_S.NONE, _E.CRASHED): _S.SUSPECT,
    (_S.NONE, _E.CRASHED_ALONE): _S.SUSPECT,
    (_S.NONE, _E.CRASHED_UNEXPLAINED): _S.SUSPECT,
    (_S.SUSPECT, _E.CRASHED): _S.SUSPECT,
    (_S.SUSPECT, _E.CRASHED_ALONE): _S.CONFIRMED,
    (_S.SUSPECT, _E.CRASHED_UNEXPLAINED): _S.STRONG,
    (_S.STRONG, _E.CRASHED): _S.STRONG,
    (_S.STRONG, _E.CRASHED_ALONE): _S.CONFIRMED,
    (_S.STRONG, _E.CRASHED_UNEXPLAINED): _S.CONFIRMED,
    (_S.CONFIRMED, _E.CRASHED): _S.CONFIRMED,
    (_S.CONFIRMED, _E.CRASHED_ALONE): _S.CONFIRMED,
    (_S.CONFIRMED, _E.CRASHED_UNEXPLAINED): _S.CONFIRMED,
}
"""An answer, the expiry of a case or an operator clears a request. A request without a case becomes only a suspect,
even if it ran alone."""


@dataclass(frozen=True, slots=True)
class Crash:
    """The end of a worker for one of its requests. `message` is the message of the exit."""

    cause: ExitCause
    message: str
    alone: bool
    unexplained: bool = False

    @property
    def can_confirm(self) -> bool:
        """Whether it can confirm the request as the cause; other crashes only make the request a suspect."""
        return self.alone and self.cause is not ExitCause.OOM_COMPUTE

    @property
    def event(self) -> CrashKind:
        """What it means for the request."""
        if not self.can_confirm:
            return _E.CRASHED
        return _E.CRASHED_UNEXPLAINED if self.unexplained else _E.CRASHED_ALONE


@dataclass(frozen=True, slots=True)
class Case:
    """The evidence against one request, and when it expires; times are monotonic seconds."""

    suspicion: Suspicion
    since: float
    until: float
    crashes: int = 1
    cause: ExitCause = ExitCause.ASSERT
    message: str = ""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The cases of one model by request key, in the order of their last crash. `in_a_row`: requests confirmed since the
    last answer.
    """

    cases: Mapping[str, Case] = field(default_factory=dict)
    in_a_row: tuple[str, ...] = ()
    doubted: bool = False
    """The model is assumed to be at fault: no request is confirmed."""

    def suspicion(self, key: str, now: float) -> Suspicion:
        """How strongly a request is suspected."""
        case = self.cases.get(key)
        return case.suspicion if case is not None and now < case.until else _S.NONE

    def crashed(self, key: str, crash: Crash, now: float) -> Quarantine:
        """The worker ended while this request was in flight."""
        old = self.cases.get(key) if self.suspicion(key, now) is not _S.NONE else None
        before = old.suspicion if old is not None else _S.NONE
        suspicion = TABLE[before, crash.event]
        quarantine = self
        if suspicion is _S.CONFIRMED and before is not _S.CONFIRMED:
            if self.doubted or len(self.in_a_row) >= MAX_IN_A_ROW:
                quarantine, suspicion = self._doubt(), before
            else:
                quarantine = replace(self, in_a_row=(*self.in_a_row, key))
        case = Case(
            suspicion,
            old.since if old is not None else now,
            now + (CONFIRMED_SECONDS if suspicion is _S.CONFIRMED else SUSPECT_SECONDS),
            1 + (old.crashes if old is not None else 0),
            crash.cause,
            crash.message,
        )
        others = {name: kept for name, kept in quarantine.cases.items() if name != key and now < kept.until}
        surplus = max(0, len(others) + 1 - MAX_CASES)
        kept = dict([*others.items()][surplus:])
        return replace(quarantine, cases=kept | {key: case})

    def answered(self, key: str) -> Quarantine:
        """The worker answered this request and is alive."""
        return replace(self.forget(key), in_a_row=(), doubted=False)

    def forget(self, key: str) -> Quarantine:
        """Without this case."""
        return replace(self, cases={name: case for name, case in self.cases.items() if name != key})

    def _doubt(self) -> Quarantine:
        """The model is at fault: the requests confirmed in a row are cleared."""
        remaining = {name: case for name, case in self.cases.items() if name not in self.in_a_row}
        return Quarantine(remaining, (), doubted=True)
