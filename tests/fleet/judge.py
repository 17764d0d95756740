"""Decides from what clients, links and nodes saw whether every promise of a fleet was kept. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.chaos.judge import SLACK_SECONDS, End, Violation

WHOLE_ANSWER = "a complete answer is the one of an undisturbed node"
NOT_LOST = "no request is lost that another node can answer"
HAS_CODE = "an error has a code"
NOT_CUT = "a stream is never cut silently"
ENDS = "every request ends in time"
CONNECTED = "a connection breaks only with its gateway"
PROTOCOL = "an answer keeps to the protocol"
ONE_PROBE = "an open breaker has one probe in the whole fleet"
LIMITED = "a limit holds in the whole fleet"
RECOVERS = "after its faults a node is used again"
CONVERGES = "after all faults the fleet converges"
EFFECT = "every fault takes effect"
LEDGER = "the ledger of every node is right"

NEW = -1
"""The number of a prompt that no node has seen: its answer is not known, and no node has it in its cache."""
MAX_BREAKS = 1
"""A request that broke on more nodes is perhaps the cause, and is not sent to another one."""
_ROUNDING = 1e-6


@dataclass(slots=True)
class Outcome:
    """One request from the view of its client; times are seconds of the clock of the run.

    `prompt`: the number of its reference, or NEW. `node`: the one that began the answer.
    """

    id: str
    gateway: int
    prompt: int
    stream: bool
    began: float
    ended: float = 0.0
    end: End | None = None
    text: str = ""
    status: int | None = None
    code: str | None = None
    detail: str = ""
    node: str = ""
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Outage:
    """A period without a gateway. With `drains`, requests that it has at `start` are answered."""

    gateway: int
    start: float
    end: float
    drains: bool = False

    def excuses(self, outcome: Outcome) -> bool:
        """Whether it may have broken this request."""
        if outcome.gateway != self.gateway or outcome.began > self.end + SLACK_SECONDS:
            return False
        return (outcome.began if self.drains else outcome.ended) >= self.start - SLACK_SECONDS


@dataclass(frozen=True, slots=True)
class Trouble:
    """A period in which answers of a node may break; `gateway` None: at all gateways."""

    node: str
    start: float
    end: float
    gateway: int | None = None

    def touches(self, outcome: Outcome) -> bool:
        """Whether the request was under way in this period, at an affected gateway."""
        overlaps = self.start - SLACK_SECONDS <= outcome.ended and outcome.began <= self.end + SLACK_SECONDS
        return overlaps and self.gateway in (None, outcome.gateway)


@dataclass(slots=True)
class Facts:
    """What happened during the run. `isolated`: periods in which a gateway had no node, and a moment after them."""

    references: Sequence[str] = ()
    outages: list[Outage] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    isolated: list[Outage] = field(default_factory=list)

    def was_out(self, outcome: Outcome) -> bool:
        """Whether its gateway may have broken it."""
        return any(outage.excuses(outcome) for outage in self.outages)

    def may_fail(self, outcome: Outcome) -> bool:
        """Whether no node could answer it, or faults of more nodes than MAX_BREAKS touched it."""
        if any(period.excuses(outcome) for period in self.isolated):
            return True
        return len({trouble.node for trouble in self.troubles if trouble.touches(outcome)}) > MAX_BREAKS


def violations(outcomes: Iterable[Outcome], facts: Facts) -> list[Violation]:
    """Every promise that one of these requests broke."""
    return [
        Violation(promise, outcome.ended, seen(outcome)) for outcome in outcomes for promise in _broken(outcome, facts)
    ]


def _broken(outcome: Outcome, facts: Facts) -> Iterable[str]:
    match outcome.end:
        case None | End.SILENT:
            yield ENDS
        case End.COMPLETE:
            if not outcome.text if outcome.prompt == NEW else outcome.text != facts.references[outcome.prompt]:
                yield WHOLE_ANSWER
        case End.REFUSED | End.ERROR_FRAME:
            if outcome.code is None:
                yield HAS_CODE
            if not facts.was_out(outcome) and not facts.may_fail(outcome):
                yield NOT_LOST
        case End.BROKEN:
            if not facts.was_out(outcome):
                yield CONNECTED
        case End.CUT:
            yield NOT_CUT
        case _:
            yield PROTOCOL


def seen(outcome: Outcome) -> str:
    """What the client saw, for a report."""
    fields = {
        "end": outcome.end, "status": outcome.status, "code": outcome.code, "node": outcome.node,
        "attempts": outcome.attempts, "prompt": outcome.prompt, "from": round(outcome.began, 2),
        "seconds": round(outcome.ended - outcome.began, 2), "text": outcome.text[-200:],
        "detail": outcome.detail[:300],
    }  # fmt: skip
    words = ", ".join(f"{name} {value}" for name, value in fields.items() if value not in (None, ""))
    return f"{outcome.id} at gateway-{outcome.gateway}: {words}"


def max_at_once(periods: Iterable[tuple[float, float]]) -> int:
    """The largest number of periods that overlap; one may begin at the end of another."""
    changes = sorted((time, change) for start, end in periods for time, change in ((start, 1), (end, -1)))
    most = now = 0
    for _time, change in changes:
        now += change
        most = max(most, now)
    return most


def max_admitted(limit: int, seconds: float, gateways: int, *, is_alone: bool) -> int:
    """The number of requests that a limit per minute allows in a period.

    With `is_alone` the gateways have lost the store: all together may admit one part of the limit more.
    """
    bound = limit * (1 + seconds / 60)
    return int(bound + (bound / gateways if is_alone else 0.0) + _ROUNDING)
