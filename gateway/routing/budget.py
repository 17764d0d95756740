"""Decides which deadline of a request comes next, and whether one more attempt is allowed.

Times are seconds on one monotonic clock, which is passed in; durations are seconds.
"""

from __future__ import annotations

import math
from enum import StrEnum
from operator import itemgetter
from typing import NamedTuple


class Limits(NamedTuple):
    """The limits of the configuration and of the client.

    `first_token` and `inter_token` bound silence, `total` the time to commit, `load_wait` the wait for a cold model
    before the next candidate is tried. `client_silence` is how long the client waits for an answer to begin,
    `client_gap` how long it waits for the next byte of one that has begun; None without such a limit.
    """

    first_token: float
    inter_token: float
    total: float
    load_wait: float
    attempts: int
    client_silence: float | None = None
    client_gap: float | None = None


KEEP_ALIVE_FACTOR = 4
"""How many times `first_token` a stream of keep-alives may last. A cloud sends keep-alives during hidden reasoning,
which may take minutes, and also when no answer follows."""


class Due(StrEnum):
    """Which deadline passed."""

    SILENCE = "silence"
    """the provider was silent for too long: its failure"""
    LOAD_WAIT = "load_wait"
    """the request made progress and waited long enough; another candidate may be quicker"""
    TOTAL = "total"
    """the time of the request is over"""
    CLIENT = "client"
    """the client stops waiting"""


class Deadline(NamedTuple):
    """The next deadline: when, what it means, and whether it bounds a stream of keep-alives."""

    at: float
    due: Due
    kept_alive: bool = False


_AT = itemgetter(0)
"""Key for `min`: of deadlines at the same time the first one wins."""


class Budget(NamedTuple):
    """The time and attempts of one request.

    The client had waited `waited` seconds when the request `started`. `quiet_since` is when the client got the last
    byte of an interrupted answer; None before.
    """

    limits: Limits
    started: float
    attempts: int = 0
    waited: float = 0.0
    quiet_since: float | None = None

    @property
    def client_wait_ends(self) -> float:
        """When the client stops waiting for an answer to begin."""
        silence = self.limits.client_silence
        return math.inf if silence is None or self.quiet_since is not None else self.started - self.waited + silence

    @property
    def commit_by(self) -> float:
        """When the answer must have begun."""
        return min(self.started + self.limits.total, self.client_wait_ends)

    @property
    def commit_due(self) -> Due:
        """Which limit sets `commit_by`: the client's or the configuration's."""
        return Due.CLIENT if self.client_wait_ends < self.started + self.limits.total else Due.TOTAL

    @property
    def max_gap(self) -> float:
        """How long the client waits for the next byte of an answer that has begun."""
        return math.inf if self.limits.client_gap is None else self.limits.client_gap

    @property
    def has_short_gap(self) -> bool:
        """Whether half of the client's limit between two bytes is shorter than `inter_token`.

        The other half is left for candidates that resume the answer.
        """
        return self.max_gap < 2 * self.limits.inter_token

    def resume_seconds_left(self, now: float) -> float:
        """Seconds that the client still waits for the rest of an interrupted answer."""
        return math.inf if self.quiet_since is None else self.quiet_since + self.max_gap - now

    def has_time(self, now: float) -> bool:
        """Whether there is time left to begin an answer, or to resume it."""
        return now < self.commit_by and self.resume_seconds_left(now) > 0

    def limit_text(self, now: float) -> str:
        """The limit that ends the wait for an answer, as words for an error message."""
        if self.commit_due is Due.CLIENT or now >= self.client_wait_ends:
            return f"the client's own timeout of {self.limits.client_silence:g} s"
        return f"the {self.limits.total:g} s that a request has (deadlines.total)"

    @property
    def attempts_left(self) -> int:
        """How many more attempts may start."""
        return self.limits.attempts - self.attempts

    def allows_attempt(self, now: float) -> bool:
        """Whether one more attempt may start."""
        return self.attempts < self.limits.attempts and now < self.commit_by

    def share(self, started: float) -> float:
        """Seconds that an attempt that began at `started` may be silent, or load, while other candidates remain.

        Where the client has the shorter limit, an attempt gets half of the remaining time, so that the next one still
        has a chance.
        """
        return (self.commit_by - started) / 2 if self.commit_due is Due.CLIENT else math.inf

    def renewed(self, now: float, quiet_since: float) -> Budget:
        """The budget for resuming an interrupted answer: as much time as its beginning had.

        The client got the last byte at `quiet_since`; from then on its limit between two bytes applies.
        """
        return Budget(self.limits, now, self.attempts, self.waited, quiet_since)

    def spend(self) -> Budget:
        """The budget after one more attempt began."""
        return Budget(self.limits, self.started, self.attempts + 1, self.waited, self.quiet_since)


class Phase(NamedTuple):
    """The progress of one attempt.

    `last_activity` is when the last frame or comment arrived (at first: when the attempt started). `waiting`: the last
    progress comment says that the request is queued or the model loads. `answered`: content has arrived. `sent`: the
    client has a part of the answer. `last`: no other candidate could answer, or resume, after it. `whole`: the client
    gets nothing before the end. `opened`: the stream is open; from then on the client of a resumed answer gets its
    comments. `idle_since` is since when only keep-alives have arrived; None after content or progress.
    """

    started: float
    last_activity: float
    waiting: bool = False
    answered: bool = False
    sent: bool = False
    last: bool = False
    whole: bool = False
    idle_since: float | None = None
    opened: bool = True


def next_deadline(budget: Budget, phase: Phase) -> Deadline:
    """The earliest deadline that applies in `phase`; silence wins a tie, because the provider had its full time.

    A candidate that used its share of the client's time is a spill, not a failure. After the first token `total` no
    longer applies; the limit of a client that waits for a whole answer still does.
    """
    limits = budget.limits
    if phase.answered:
        silence = _silence(limits, phase, limits.inter_token)
        gap = Deadline(budget.client_wait_ends, Due.CLIENT) if phase.whole else _client_gap(budget, phase)
        return min(silence, gap, key=_AT)
    found = [_silence(limits, phase, limits.first_token)]
    if not phase.last:
        share = budget.share(phase.started)
        last_activity = phase.last_activity if phase.idle_since is None else phase.idle_since
        found.append(Deadline(last_activity + share, Due.LOAD_WAIT))
        if phase.waiting:
            found.append(Deadline(phase.started + min(limits.load_wait, share), Due.LOAD_WAIT))
    if not phase.sent:
        found.append(Deadline(budget.commit_by, budget.commit_due))
    if phase.sent or budget.quiet_since is not None:
        found.append(_client_gap(budget, phase))
    return min(found, key=_AT)


def _client_gap(budget: Budget, phase: Phase) -> Deadline:
    """When the client has waited too long for the next byte.

    Half of the time is kept for the candidates that could resume; without any, all of it is used.
    """
    quiet_since = phase.last_activity if phase.opened or budget.quiet_since is None else budget.quiet_since
    latest = quiet_since + budget.max_gap
    return Deadline(latest, Due.CLIENT) if phase.last else Deadline((phase.last_activity + latest) / 2, Due.LOAD_WAIT)


def _silence(limits: Limits, phase: Phase, allowed: float) -> Deadline:
    """When a stream has been silent for `allowed` seconds; keep-alives postpone the deadline."""
    silent = Deadline(phase.last_activity + allowed, Due.SILENCE)
    if phase.idle_since is None:
        return silent
    bound = phase.idle_since + max(allowed, KEEP_ALIVE_FACTOR * limits.first_token)
    return min(silent, Deadline(bound, Due.SILENCE, kept_alive=True), key=_AT)


def unary_deadline(budget: Budget, started: float, *, is_local: bool, last: bool) -> Deadline:
    """The deadline of an answer without a stream, which shows no progress.

    The inference service may be loading the model, so its silence is not a failure: its limit is `load_wait`, or all
    remaining time for the last candidate. The limit of a cloud is `first_token`.
    """
    found = [Deadline(budget.commit_by, budget.commit_due)]
    if not is_local:
        found.insert(0, Deadline(started + budget.limits.first_token, Due.SILENCE))
    if not last:
        wait = budget.limits.load_wait if is_local else math.inf
        found.append(Deadline(started + min(wait, budget.share(started)), Due.LOAD_WAIT))
    return min(found, key=_AT)
