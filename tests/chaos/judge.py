"""Decides from what clients saw whether every promise was kept; sees no process and asks no service. Pure.

A request ends once: with a complete answer, or with an honest error. What broke it must have touched the tier that was
answering. Only a gateway that was killed may break a connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

SLACK_SECONDS = 0.3
"""Clocks of the injector and of a client are read at different moments of one busy machine."""

ABORTS = frozenset({"worker_abort", "oom_compute", "disk_full"})
"""Faults that look like a worker's own failure at what it was computing."""


class End(StrEnum):
    """How a request ended, as its client saw it."""

    COMPLETE = "complete"
    REFUSED = "refused"
    """An error status with the envelope."""
    ERROR_FRAME = "error_frame"
    """A stream that began and ended in an error frame."""
    CUT = "cut"
    """A stream that ended properly, without a finish reason and without an error."""
    BROKEN = "broken"
    """The connection broke, or could not be made."""
    LEFT = "left"
    """The client itself left."""
    SILENT = "silent"
    """Nothing came for longer than any deadline of the gateway."""
    STRANGE = "strange"
    """Something else than the protocol allows; `detail` says what."""


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it; times are seconds of the run's clock.

    `answered_by` is x-headgate-model, `done` whether `[DONE]` was on the wire, `finishes` how many finish reasons came.
    """

    id: str
    route: str
    stream: bool
    began: float
    first_token: float | None = None
    ended: float = 0.0
    end: End | None = None
    status: int | None = None
    code: str | None = None
    detail: str = ""
    tier: str = ""
    answered_by: str = ""
    attempts: int = 0
    reason: str = ""
    done: bool = False
    finishes: int = 0
    clean: bool = True
    """Whether the body came to its proper end."""
    endless: bool = False
    """Asked to go on past the end of an answer, which no cloud does: only local tiers are behind it."""


@dataclass(frozen=True, slots=True)
class Window:
    """A time in which a fault may break answers of these models of the local service (None: all of them)."""

    kind: str
    models: frozenset[str] | None
    start: float
    end: float

    def touches(self, model: str, start: float, end: float) -> bool:
        """Whether it may have broken an answer of `model` that ran from `start` to `end`."""
        overlaps = self.start - SLACK_SECONDS <= end and start <= self.end + SLACK_SECONDS
        return overlaps and (self.models is None or model in self.models)


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was not kept: which, when, and what was seen."""

    promise: str
    at: float
    seen: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What happened meanwhile: windows of faults, outages of the gateway, and the routes that a second tier backs."""

    windows: Sequence[Window] = ()
    outages: Sequence[tuple[float, float]] = ()
    backed: frozenset[str] = field(default_factory=frozenset)

    def backs(self, outcome: Outcome) -> bool:
        """Whether another tier could have answered it."""
        return outcome.route in self.backed and not outcome.endless

    def was_out(self, outcome: Outcome) -> bool:
        """Whether the gateway was down at some moment of the request."""
        return any(
            start - SLACK_SECONDS <= outcome.ended and outcome.began <= end + SLACK_SECONDS
            for start, end in self.outages
        )

    def explains(self, outcome: Outcome) -> bool:
        """Whether a fault may have broken the answer of the local model that was answering."""
        provider, _, model = outcome.answered_by.partition("/")
        return provider == "local" and any(
            window.touches(model, outcome.began, outcome.ended) for window in self.windows
        )

    def looks_like_poison(self, outcome: Outcome) -> bool:
        """Whether it was refused for good because a worker aborted under it twice, which an abort by hand may cause."""
        aborts = [
            window
            for window in self.windows
            if window.kind in ABORTS and window.start <= outcome.ended and outcome.began <= window.end
        ]
        return outcome.code == "poison_request" and len(aborts) > 1


def violations(outcomes: Iterable[Outcome], facts: Facts) -> list[Violation]:
    """Every promise that one of these requests shows broken."""
    return [
        Violation(promise, outcome.ended, _seen(outcome)) for outcome in outcomes for promise in _broken(outcome, facts)
    ]


def _broken(outcome: Outcome, facts: Facts) -> Iterable[str]:
    match outcome.end:
        case None:
            yield "every request ends"
        case End.COMPLETE:
            if outcome.finishes != 1:
                yield "a complete answer has one finish reason"
            if outcome.stream and not outcome.done:
                yield "a complete stream ends in [DONE]"
        case End.REFUSED:
            if outcome.code is None:
                yield "an error says its code"
            if facts.backs(outcome) and not facts.was_out(outcome) and not facts.looks_like_poison(outcome):
                yield "with a tier to fall back to, no request fails before its first token"
        case End.ERROR_FRAME:
            if outcome.code is None:
                yield "an error says its code"
            if outcome.first_token is None and facts.backs(outcome) and not facts.was_out(outcome):
                yield "with a tier to fall back to, no request fails before its first token"
            elif not facts.explains(outcome) and not facts.was_out(outcome):
                yield "requests to models that no fault touched never fail"
        case End.CUT:
            yield "a stream is never cut silently"
        case End.BROKEN:
            if not facts.was_out(outcome):
                yield "a connection breaks only with the gateway"
        case End.SILENT:
            yield "no request waits for ever"
        case End.STRANGE:
            yield "an answer keeps to the protocol"
    if outcome.done and outcome.end is not End.COMPLETE and outcome.end is not End.LEFT:
        yield "no stream without a finish reason ends in [DONE]"


def _seen(outcome: Outcome) -> str:
    told = {
        "end": outcome.end, "status": outcome.status, "code": outcome.code, "by": outcome.answered_by,
        "attempts": outcome.attempts, "finishes": outcome.finishes, "done": outcome.done,
        "seconds": round(outcome.ended - outcome.began, 2), "said": outcome.detail[:300],
    }  # fmt: skip
    words = ", ".join(f"{name} {value}" for name, value in told.items() if value not in (None, ""))
    return f"{outcome.id} to {outcome.route}: {words}"


def tally(outcomes: Iterable[Outcome]) -> Mapping[str, int]:
    """How many requests ended how."""
    found: dict[str, int] = {}
    for outcome in outcomes:
        name = str(outcome.end or "open")
        found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items()))
