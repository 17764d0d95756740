"""Decides which breaker of the inference service is probed next, when, and what the answer proves.

Only the inference service is probed, because a probe of it costs almost nothing. Cloud providers are not probed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from gateway.breaker.outcome import Failure, Ignore, Observation, Reason, Scope, judge
from gateway.breaker.permits import BreakerState
from gateway.errors import UpstreamError, UpstreamKind

CONFIRM_SECONDS = 0.25
"""The time between two confirmation probes."""
MIN_PACE_SECONDS, MAX_PACE_SECONDS = 0.5, 4.0
PACE_SHARE = 0.1
"""The time between recovery probes, as a share of the time since the breaker opened."""
FALSE_RECOVERY_FACTOR = 8.0
"""After each false recovery, the time after which a probe may end an open period is multiplied by this number."""
POSTPONE_SECONDS = 10.0
"""After a failed probe the open period lasts at least this long, or as long as the rule opens a breaker if that is
shorter. It is longer than the slowest pace and one probe."""


class Purpose(StrEnum):
    """The purpose of a probe."""

    CONFIRM = "confirm"
    """whether the service is down after one failure: each failed probe counts as one more"""
    RECOVER = "recover"
    """whether an open period may end early"""


class ProbeKind(StrEnum):
    """The request that a probe makes."""

    READY = "ready"
    """`GET /readyz`: whether the service is up"""
    PLAN = "plan"
    """`POST /memory/plan`: whether the model would fit now"""
    TOKEN = "token"
    """a request for one token of the model, which loads nothing and does not count as use"""


TIMEOUT_SECONDS: Mapping[ProbeKind, float] = {ProbeKind.READY: 1.5, ProbeKind.PLAN: 2.0, ProbeKind.TOKEN: 2.0}


class Finding(StrEnum):
    """The result of a probe."""

    GOOD = "good"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Watch:
    """The probes of one breaker of the inference service while something is wrong. Times are monotonic seconds.

    `suspected_at`: time of a failure that probes have yet to confirm. `not_closed_since`: since when the breaker has
    not been closed. `opened_at`: start of the present open period. `ended_early`: a probe ended that period.
    `false_recoveries`: number of early ends after which a request of a user failed. `needs_memory`: it opened because
    the service refused memory.
    """

    suspected_at: float | None = None
    not_closed_since: float | None = None
    opened_at: float = 0.0
    probed_at: float | None = None
    ended_early: bool = False
    false_recoveries: int = 0
    needs_memory: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """The next probe: the model (empty: the service itself), its purpose and kind, and its earliest time."""

    model: str
    purpose: Purpose
    kind: ProbeKind
    at: float


def suspected(watch: Watch, now: float) -> Watch:
    """A failure of the service was seen. A running series of probes is not changed."""
    return watch if watch.suspected_at is not None else replace(watch, suspected_at=now, probed_at=None)


def opened(watch: Watch, now: float, needs_memory: bool = False) -> Watch:
    """The breaker opened, or opened again."""
    return Watch(
        not_closed_since=now if watch.not_closed_since is None else watch.not_closed_since,
        opened_at=now,
        false_recoveries=watch.false_recoveries + watch.ended_early,
        needs_memory=needs_memory,
    )


def probed(watch: Watch, purpose: Purpose, finding: Finding, now: float) -> Watch:
    """A probe ended at `now`."""
    if purpose is Purpose.CONFIRM:
        return replace(watch, probed_at=now, suspected_at=None if finding is Finding.GOOD else watch.suspected_at)
    return replace(watch, probed_at=now, ended_early=finding is Finding.GOOD)


def due_now(watch: Watch) -> Watch:
    """The service may have recovered: the next recovery probe does not wait for the pace after the last one."""
    return replace(watch, probed_at=None) if watch.suspected_at is None else watch


def due_at(watch: Watch, state: BreakerState) -> float | None:
    """When the next probe of this breaker is due; None when none is needed.

    A half-open breaker, or one whose open period was ended by a probe, waits for a user's request.
    """
    if state is BreakerState.CLOSED:
        if watch.suspected_at is None:
            return None
        return (watch.suspected_at if watch.probed_at is None else watch.probed_at) + CONFIRM_SECONDS
    if state is BreakerState.HALF_OPEN or watch.ended_early:
        return None
    least = watch.opened_at + MIN_PACE_SECONDS * FALSE_RECOVERY_FACTOR**watch.false_recoveries
    if watch.probed_at is None:
        return least
    elapsed = watch.probed_at - (watch.opened_at if watch.not_closed_since is None else watch.not_closed_since)
    pace = min(max(elapsed * PACE_SHARE, MIN_PACE_SECONDS), MAX_PACE_SECONDS)
    return max(least, watch.probed_at + pace)


def choose(watches: Mapping[str, Watch], states: Mapping[str, BreakerState]) -> Step | None:
    """The probe that is due first; None when none is needed. Keys are models, empty for the service itself.

    While probes of the service itself are due, its models are not probed: a failure would not show anything about the
    model. Afterwards they are probed at once, because an open breaker of a model refuses the requests of users.
    """
    if (own := watches.get("")) is not None:
        state = states.get("", BreakerState.CLOSED)
        if (at := due_at(own, state)) is not None:
            return Step("", _purpose(state), ProbeKind.READY, at)
    steps = [
        Step(model, _purpose(states[model]), ProbeKind.PLAN if watch.needs_memory else ProbeKind.TOKEN, at)
        for model, watch in watches.items()
        if model and model in states and (at := due_at(watch, states[model])) is not None
    ]
    return min(steps, key=lambda step: (step.at, step.model), default=None)


def _purpose(state: BreakerState) -> Purpose:
    return Purpose.CONFIRM if state is BreakerState.CLOSED else Purpose.RECOVER


def judge_probe(purpose: Purpose, kind: ProbeKind, answer: UpstreamError | Mapping[str, Any]) -> Finding:
    """The finding of a probe, from its answer or its error.

    Any answer but a 5xx proves that the service is up. A 5xx alone does not keep an open breaker open, because the
    service may still serve requests. A plan that refuses proves nothing, because a load may reduce its settings;
    neither does a time-out of a model, which may be busy.
    """
    error = answer if isinstance(answer, UpstreamError) else None
    if kind is ProbeKind.READY:
        found = Finding.GOOD if error is None else _ready_finding(error)
        is_undecided = error is not None and error.status is not None and purpose is Purpose.RECOVER
        return Finding.UNKNOWN if found is Finding.BAD and is_undecided else found
    if kind is ProbeKind.PLAN:
        fits = isinstance(answer, Mapping) and answer.get("result") != "CANT_ACCOMMODATE"
        return Finding.GOOD if fits else Finding.UNKNOWN
    return Finding.GOOD if error is None else _token_finding(error)


def _ready_finding(error: UpstreamError) -> Finding:
    answered = error.kind is UpstreamKind.MALFORMED or (error.status is not None and error.status < 500)
    return Finding.GOOD if answered else Finding.BAD


def _token_finding(error: UpstreamError) -> Finding:
    verdict = judge(Observation(error.kind, error.status, error.code, is_local=True))
    if isinstance(verdict, Failure):
        blamed = verdict.scope is Scope.PAIR and error.kind is not UpstreamKind.TIMEOUT
        return Finding.BAD if blamed else Finding.UNKNOWN
    return Finding.UNKNOWN if verdict == Ignore(Reason.DEADLINE) else Finding.GOOD


def is_down(error: UpstreamError) -> bool:
    """Whether `error`, of a request to any path, shows that the service itself is down."""
    return _ready_finding(error) is Finding.BAD and error.code is None
