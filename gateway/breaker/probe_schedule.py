"""Decides which breaker of our own service is probed next, when, and what the answer proves; never asks anything.

Only our own service is ever probed, and what a probe costs it is next to nothing. Clouds have no watch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from gateway.breaker.outcome import Failure, Ignore, Observation, Reason, Scope, judge
from gateway.breaker.permits import State
from gateway.errors import UpstreamError, UpstreamKind

CONFIRM_SECONDS = 0.25
"""Between two confirmation probes."""
LEAST_PACE_SECONDS, MOST_PACE_SECONDS = 0.5, 4.0
PACE_SHARE = 0.1
"""Recovery probes come after this share of the time that the trouble has lasted."""
LETDOWN_FACTOR = 8.0
"""With each letdown an open period has to last so many times as long before a probe may end it."""
POSTPONE_SECONDS = 10.0
"""After a failed probe the open period does not end sooner than this: longer than the slowest pace and a probe."""


class Purpose(StrEnum):
    """What a probe is for."""

    CONFIRM = "confirm"
    """whether one failure of the service was the first of many: each probe that fails counts as one more"""
    RECOVER = "recover"
    """whether an open period may end early"""


class Question(StrEnum):
    """What a probe asks."""

    READY = "ready"
    """`GET /readyz`: is the service there"""
    PLAN = "plan"
    """`POST /memory/plan`: would the model fit now"""
    TOKEN = "token"
    """one token of the model, by a request that loads nothing and is no use"""


ASK_SECONDS: Mapping[Question, float] = {Question.READY: 1.5, Question.PLAN: 2.0, Question.TOKEN: 2.0}
"""How long an answer is awaited."""


class Finding(StrEnum):
    """What a probe found out."""

    GOOD = "good"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Watch:
    """What is remembered about one breaker of our own service while something is wrong with it. Monotonic seconds.

    `suspected_at`: a failure waits for its confirmation since then. `troubled_since`: the breaker has not been closed
    since then. `opened_at` begins the present open period. `hastened`: a probe ended it early. `letdowns`: how often
    that was followed by a user's failure. `needs_memory`: what opened it was a refusal of memory.
    """

    suspected_at: float | None = None
    troubled_since: float | None = None
    opened_at: float = 0.0
    asked_at: float | None = None
    hastened: bool = False
    letdowns: int = 0
    needs_memory: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """The next probe: of which model's breaker (empty: the service's own), why, what it asks, and not before when."""

    model: str
    purpose: Purpose
    question: Question
    at: float


def suspected(watch: Watch, now: float) -> Watch:
    """A failure of the service was seen. A series that runs already goes on as it is."""
    return watch if watch.suspected_at is not None else replace(watch, suspected_at=now, asked_at=None)


def opened(watch: Watch, now: float, needs_memory: bool = False) -> Watch:
    """The breaker opened, or opened again."""
    return Watch(
        troubled_since=now if watch.troubled_since is None else watch.troubled_since,
        opened_at=now,
        letdowns=watch.letdowns + watch.hastened,
        needs_memory=needs_memory,
    )


def asked(watch: Watch, purpose: Purpose, finding: Finding, now: float) -> Watch:
    """A probe came back at `now`."""
    if purpose is Purpose.CONFIRM:
        return replace(watch, asked_at=now, suspected_at=None if finding is Finding.GOOD else watch.suspected_at)
    return replace(watch, asked_at=now, hastened=finding is Finding.GOOD)


def hinted(watch: Watch) -> Watch:
    """Something says that it is well again: the next recovery probe need not wait for its pace."""
    return replace(watch, asked_at=None) if watch.suspected_at is None else watch


def due_at(watch: Watch, state: State) -> float | None:
    """When the next probe of this breaker is due, None when nothing is to be found out.

    A half-open breaker, or one whose open period a probe has ended, waits for a user.
    """
    if state is State.CLOSED:
        if watch.suspected_at is None:
            return None
        return (watch.suspected_at if watch.asked_at is None else watch.asked_at) + CONFIRM_SECONDS
    if state is State.HALF_OPEN or watch.hastened:
        return None
    least = watch.opened_at + LEAST_PACE_SECONDS * LETDOWN_FACTOR**watch.letdowns
    if watch.asked_at is None:
        return least
    trouble = watch.asked_at - (watch.opened_at if watch.troubled_since is None else watch.troubled_since)
    pace = min(max(trouble * PACE_SHARE, LEAST_PACE_SECONDS), MOST_PACE_SECONDS)
    return max(least, watch.asked_at + pace)


def choose(watches: Mapping[str, Watch], states: Mapping[str, State]) -> Step | None:
    """The probe that is due first, None when there is nothing to find out. Keys are models, empty for the service.

    While the service itself is in doubt, nothing is asked about its models: the answer would be about the service. Once
    it answers, they are asked for even before a user has come: none could pass where the model's breaker is open too.
    """
    if (own := watches.get("")) is not None:
        state = states.get("", State.CLOSED)
        if (at := due_at(own, state)) is not None:
            return Step("", _purpose(state), Question.READY, at)
    steps = [
        Step(model, _purpose(states[model]), Question.PLAN if watch.needs_memory else Question.TOKEN, at)
        for model, watch in watches.items()
        if model and model in states and (at := due_at(watch, states[model])) is not None
    ]
    return min(steps, key=lambda step: (step.at, step.model), default=None)


def _purpose(state: State) -> Purpose:
    return Purpose.CONFIRM if state is State.CLOSED else Purpose.RECOVER


def found(purpose: Purpose, question: Question, said: UpstreamError | Mapping[str, Any]) -> Finding:
    """What an answer, or the error instead of one, proves.

    The service is there as soon as it answers anything but a 5xx. One that answers a 5xx may serve users all the same,
    so that this alone never keeps them away. A plan that refuses proves nothing, because a load may bend its settings;
    nor does silence of a model, which may only be busy.
    """
    if question is Question.READY:
        finding = _found_ready(said) if isinstance(said, UpstreamError) else Finding.GOOD
        answered = isinstance(said, UpstreamError) and said.status is not None
        undecided = finding is Finding.BAD and answered and purpose is Purpose.RECOVER
        return Finding.UNKNOWN if undecided else finding
    if question is Question.PLAN:
        fits = isinstance(said, Mapping) and said.get("result") != "CANT_ACCOMMODATE"
        return Finding.GOOD if fits else Finding.UNKNOWN
    return _found_token(said) if isinstance(said, UpstreamError) else Finding.GOOD


def _found_ready(error: UpstreamError) -> Finding:
    answered = error.kind is UpstreamKind.MALFORMED or (error.status is not None and error.status < 500)
    return Finding.GOOD if answered else Finding.BAD


def _found_token(error: UpstreamError) -> Finding:
    verdict = judge(Observation(error.kind, error.status, error.code, is_local=True))
    if isinstance(verdict, Failure):
        blamed = verdict.scope is Scope.PAIR and error.kind is not UpstreamKind.TIMEOUT
        return Finding.BAD if blamed else Finding.UNKNOWN
    return Finding.UNKNOWN if verdict == Ignore(Reason.DEADLINE) else Finding.GOOD


def is_down(error: UpstreamError) -> bool:
    """Whether `error` says that the service itself is in trouble, whichever path was asked."""
    return _found_ready(error) is Finding.BAD and error.code is None
