"""Decides from what clients saw whether every promise was kept. Pure.

A request ends once: with a complete answer, or with an error. The fault that broke it must have affected the tier that
was answering. Only a killed gateway may break a connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

SLACK_SECONDS = 0.3
"""Tolerance between the clocks of the injector and of a client on a busy machine."""

SAME_ANSWER = "a prompt has the same answer from whichever tier it is continued"
OWN_TOKENS = "no tenant continues the tokens of another"
OTHER_REPLICA = "while one replica of a model is ready, no request fails before its first token"
SURE = 0.5
"""Difference of log probabilities; ten times what the batch changes in the demo models."""
SHARED_TOKENS = 32
"""More than a chat template has before the first message."""

ABORTS = frozenset({"worker_abort", "oom_compute", "disk_full"})
"""Faults that look like a failure of the worker itself."""


class End(StrEnum):
    """How a request ended for its client."""

    COMPLETE = "complete"
    REFUSED = "refused"
    """An error status with the envelope."""
    ERROR_FRAME = "error_frame"
    """A stream that began and ended in an error frame."""
    CUT = "cut"
    """A stream that ended normally, without a finish reason and without an error."""
    BROKEN = "broken"
    """The connection broke, or could not be opened."""
    LEFT = "left"
    """The client disconnected."""
    SILENT = "silent"
    """Silence for longer than any deadline of the gateway."""
    STRANGE = "strange"
    """A violation of the protocol; `detail` describes it."""


@dataclass(slots=True)
class Outcome:
    """One request from the view of its client; times are seconds of the clock of the run.

    `answered_by` is x-headgate-model, `done` whether `[DONE]` was sent, `finishes` the number of finish reasons.
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
    done: bool = False
    finishes: int = 0
    endless: bool = False
    """Sent to local tiers only, because it continues past the end of an answer."""
    prompt: str = ""
    """Equal for all requests with the same prompt; empty for those that are not repeated."""
    spies: bool = False
    """Its prompt is that of another tenant, and its tenant has never sent it before."""
    survives: str = ""
    """The model of which one replica was ready when the other one ended."""
    cached: int | None = None
    """Prompt tokens that were not computed."""
    steps: tuple[tuple[str, float], ...] = ()
    """Each token of the greedy answer, and by how much its log probability exceeds that of the second best."""


@dataclass(frozen=True, slots=True)
class Window:
    """A period in which a fault may break answers of these local models (None: all of them)."""

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
    """A broken promise: which, when, and what was seen."""

    promise: str
    at: float
    seen: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What happened during the run: windows of faults, outages of the gateway, and routes with a second tier."""

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
        """Whether a fault may have broken the answer of the local model."""
        provider, _, model = outcome.answered_by.partition("/")
        return provider == "local" and any(
            window.touches(model, outcome.began, outcome.ended) for window in self.windows
        )

    def is_spared(self, outcome: Outcome) -> bool:
        """Whether nothing but the end of one replica may have broken it."""
        return not self.was_out(outcome) and not any(
            window.kind != "replica_kill" and window.touches(outcome.survives, outcome.began, outcome.ended)
            for window in self.windows
        )

    def looks_like_poison(self, outcome: Outcome) -> bool:
        """Whether it was refused because a worker aborted twice under it, which injected aborts may cause."""
        aborts = [
            window
            for window in self.windows
            if window.kind in ABORTS and window.start <= outcome.ended and outcome.began <= window.end
        ]
        return outcome.code == "poison_request" and len(aborts) > 1


def violations(outcomes: Iterable[Outcome], facts: Facts) -> list[Violation]:
    """Every promise that one of these requests broke."""
    return [
        Violation(promise, outcome.ended, _seen(outcome)) for outcome in outcomes for promise in _broken(outcome, facts)
    ]


def kv_violations(outcomes: Iterable[Outcome]) -> list[Violation]:
    """Promises about stored sequences that complete answers of local models broke."""
    found: list[Violation] = []
    first: dict[tuple[str, str], Outcome] = {}
    for outcome in sorted(outcomes, key=lambda one: one.ended):
        if outcome.end is not End.COMPLETE or not outcome.prompt or not outcome.answered_by.startswith("local/"):
            continue
        before = first.setdefault((outcome.answered_by, outcome.prompt), outcome)
        seen = f"{_seen(outcome)}, prompt {outcome.prompt}, cached {outcome.cached}"
        if departs(before.steps, outcome.steps):
            words = [" ".join(token for token, _margin in one.steps) for one in (before, outcome)]
            found.append(Violation(SAME_ANSWER, outcome.ended, f"{seen}: {words[1]!r}, before {words[0]!r}"))
        if outcome.spies and (outcome.cached or 0) > SHARED_TOKENS:
            found.append(Violation(OWN_TOKENS, outcome.ended, seen))
    return found


def conversations(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Number of complete local answers of repeated prompts: all, those that continued a sequence, those that spied."""
    turns = [
        one
        for one in outcomes
        if one.prompt and one.end is End.COMPLETE and one.answered_by.startswith("local/") and one.steps
    ]
    return {
        "turns": len(turns),
        "continued": sum((one.cached or 0) > SHARED_TOKENS for one in turns),
        "spied": sum(one.spies for one in turns),
    }


def departs(before: Sequence[tuple[str, float]], after: Sequence[tuple[str, float]]) -> bool:
    """Whether two greedy answers differ by more than rounding explains.

    The order in which llama.cpp adds numbers depends on the batch. Therefore only the first difference counts, and only
    if both answers were sure of their token.
    """
    for (token, margin), (other, other_margin) in zip(before, after, strict=False):
        if token != other:
            return min(margin, other_margin) > SURE
    return False


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
                yield "an error has a code"
            if facts.backs(outcome) and not facts.was_out(outcome) and not facts.looks_like_poison(outcome):
                yield "with a tier to fall back to, no request fails before its first token"
        case End.ERROR_FRAME:
            if outcome.code is None:
                yield "an error has a code"
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
            yield "every request ends in time"
        case End.STRANGE:
            yield "an answer keeps to the protocol"
    fails_early = outcome.end is not End.COMPLETE and outcome.first_token is None
    if outcome.survives and fails_early and facts.is_spared(outcome):
        yield OTHER_REPLICA
    if outcome.done and outcome.end is not End.COMPLETE and outcome.end is not End.LEFT:
        yield "no stream without a finish reason ends in [DONE]"


def _seen(outcome: Outcome) -> str:
    fields = {
        "end": outcome.end, "status": outcome.status, "code": outcome.code, "by": outcome.answered_by,
        "attempts": outcome.attempts, "finishes": outcome.finishes, "done": outcome.done,
        "seconds": round(outcome.ended - outcome.began, 2), "detail": outcome.detail[:300],
    }  # fmt: skip
    words = ", ".join(f"{name} {value}" for name, value in fields.items() if value not in (None, ""))
    return f"{outcome.id} to {outcome.route}: {words}"


def tally(outcomes: Iterable[Outcome]) -> Mapping[str, int]:
    """Number of requests by end."""
    found: dict[str, int] = {}
    for outcome in outcomes:
        name = str(outcome.end or "open")
        found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items()))
