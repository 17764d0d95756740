"""Decides which requests are suspected, and which convicted, of ending their worker; never runs or refuses one itself.

After an abort nobody knows which of the requests in flight it was, so all are suspects, and run alone. Who completes is
acquitted. Who ends a worker that computed nothing else is convicted; an abort without a word may have been a signal
from outside, so it takes two of those; and memory that ran out convicts nobody, because it depends on others. A model
that ends under one request after the other and completes none is at fault itself: then nobody is convicted until it has
completed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from inference.protocol import ExitCause

SUSPICIOUS = frozenset({ExitCause.ASSERT, ExitCause.OOM_COMPUTE})
"""How a worker ends by what it computes. A kill is somebody else's doing, a lost device the device's."""
SUSPECT_SECONDS = 900.0
CONVICTED_SECONDS = 3600.0
MOST_CASES = 256
"""Per model; of more, the oldest is forgotten."""
MOST_IN_A_ROW = 3
"""So many requests are convicted without one completed between them; one more, and the model is at fault."""


class Standing(StrEnum):
    """What is held of a request."""

    INNOCENT = "innocent"
    SUSPECT = "suspect"
    """was in flight when the worker ended; runs alone"""
    ACCUSED = "accused"
    """was alone once when the worker ended without a word; runs alone"""
    CONVICTED = "convicted"
    """is refused"""


class CrashKind(StrEnum):
    """How a worker's end meets one of its requests."""

    CRASHED = "crashed"
    """it computed for others too, or lacked memory"""
    CRASHED_ALONE = "crashed_alone"
    CRASHED_WORDLESS = "crashed_wordless"
    """alone, by an abort that said nothing"""


_S, _E = Standing, CrashKind
TABLE: Mapping[tuple[Standing, CrashKind], Standing] = {
    (_S.INNOCENT, _E.CRASHED): _S.SUSPECT,
    (_S.INNOCENT, _E.CRASHED_ALONE): _S.SUSPECT,
    (_S.INNOCENT, _E.CRASHED_WORDLESS): _S.SUSPECT,
    (_S.SUSPECT, _E.CRASHED): _S.SUSPECT,
    (_S.SUSPECT, _E.CRASHED_ALONE): _S.CONVICTED,
    (_S.SUSPECT, _E.CRASHED_WORDLESS): _S.ACCUSED,
    (_S.ACCUSED, _E.CRASHED): _S.ACCUSED,
    (_S.ACCUSED, _E.CRASHED_ALONE): _S.CONVICTED,
    (_S.ACCUSED, _E.CRASHED_WORDLESS): _S.CONVICTED,
    (_S.CONVICTED, _E.CRASHED): _S.CONVICTED,
    (_S.CONVICTED, _E.CRASHED_ALONE): _S.CONVICTED,
    (_S.CONVICTED, _E.CRASHED_WORDLESS): _S.CONVICTED,
}
"""An answer, the end of its time and an operator make everybody innocent. An innocent that crashes alone was nobody's
suspect when it was sent: it is looked at once more.
"""


@dataclass(frozen=True, slots=True)
class Crash:
    """One end of a worker as a request met it: `said` is the exit's sentence."""

    cause: ExitCause
    said: str
    alone: bool
    wordless: bool = False

    @property
    def is_telling(self) -> bool:
        """Whether it says anything of this one request."""
        return self.alone and self.cause is not ExitCause.OOM_COMPUTE

    @property
    def event(self) -> CrashKind:
        """What it is to the request."""
        if not self.is_telling:
            return _E.CRASHED
        return _E.CRASHED_WORDLESS if self.wordless else _E.CRASHED_ALONE


@dataclass(frozen=True, slots=True)
class Case:
    """What is held against one request, and until when; times are seconds of one monotonic clock."""

    standing: Standing
    since: float
    until: float
    crashes: int = 1
    cause: ExitCause = ExitCause.ASSERT
    said: str = ""


@dataclass(frozen=True, slots=True)
class Docket:
    """All cases of one model by the requests' keys, oldest first; `row` are those convicted since an answer."""

    cases: Mapping[str, Case] = field(default_factory=dict)
    row: tuple[str, ...] = ()
    doubted: bool = False
    """The model is at fault, as far as is known: nobody is convicted."""

    def standing(self, key: str, now: float) -> Standing:
        """What is held of a request."""
        case = self.cases.get(key)
        return case.standing if case is not None and now < case.until else _S.INNOCENT

    def crashed(self, key: str, crash: Crash, now: float) -> Docket:
        """The worker ended under this request."""
        old = self.cases.get(key) if self.standing(key, now) is not _S.INNOCENT else None
        before = old.standing if old is not None else _S.INNOCENT
        standing = TABLE[before, crash.event]
        docket = self
        if standing is _S.CONVICTED and before is not _S.CONVICTED:
            if self.doubted or len(self.row) >= MOST_IN_A_ROW:
                docket, standing = self._doubt(), before
            else:
                docket = replace(self, row=(*self.row, key))
        case = Case(
            standing,
            old.since if old is not None else now,
            now + (CONVICTED_SECONDS if standing is _S.CONVICTED else SUSPECT_SECONDS),
            1 + (old.crashes if old is not None else 0),
            crash.cause,
            crash.said,
        )
        others = {name: kept for name, kept in docket.cases.items() if name != key and now < kept.until}
        surplus = max(0, len(others) + 1 - MOST_CASES)
        kept = dict([*others.items()][surplus:])
        return replace(docket, cases=kept | {key: case})

    def answered(self, key: str) -> Docket:
        """The worker answered this request, and lives."""
        return replace(self.forget(key), row=(), doubted=False)

    def forget(self, key: str) -> Docket:
        """Without this case."""
        return replace(self, cases={name: case for name, case in self.cases.items() if name != key})

    def _doubt(self) -> Docket:
        freed = {name: case for name, case in self.cases.items() if name not in self.row}
        return Docket(freed, (), doubted=True)
