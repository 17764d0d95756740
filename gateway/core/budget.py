"""Decides which deadline of a request comes next and whether one more attempt is allowed; never reads a clock.

Times are seconds on one monotonic clock that the caller reads; durations are seconds.
"""

from __future__ import annotations

import math
from enum import StrEnum
from operator import itemgetter
from typing import NamedTuple


class Limits(NamedTuple):
    """What the configuration and the caller allow.

    `first_token` and `inter_token` bound silence, `total` the time to commit, `load_wait` the wait for a cold model
    before the next tier is tried. `caller_silence` is the caller's own read time-out, None when it named none.
    """

    first_token: float
    inter_token: float
    total: float
    load_wait: float
    attempts: int
    caller_silence: float | None = None


KEEP_ALIVE_FACTOR = 4
"""Keep-alives stand for so many `first_token` in a row: a cloud sends them while it thinks in hiding, which may take
minutes, and also while nothing ever follows."""


class Due(StrEnum):
    """Which deadline passed."""

    SILENCE = "silence"
    """the provider said nothing for too long: it is to blame"""
    LOAD_WAIT = "load_wait"
    """the request made progress and waited long enough; another tier may be quicker"""
    TOTAL = "total"
    """the request's own budget is spent"""
    CALLER = "caller"
    """the caller stops listening"""


class Deadline(NamedTuple):
    """The next deadline: when, what it means that it passed, and whether it bounds a silence behind keep-alives."""

    at: float
    due: Due
    kept_alive: bool = False


_AT = itemgetter(0)
"""Of deadlines at the same time the first one named is the one that counts."""


class Budget(NamedTuple):
    """One request's allowance across all its attempts.

    `patience` is how long its caller, who has had a part of the answer, may be left without another byte.
    """

    limits: Limits
    started: float
    attempts: int = 0
    patience: float = math.inf

    @property
    def commit_by(self) -> float:
        """When something must have been sent to the caller."""
        limits = self.limits
        silence = limits.caller_silence
        return self.started + (limits.total if silence is None else min(limits.total, silence))

    @property
    def commit_due(self) -> Due:
        """Whose limit `commit_by` is: the caller's or ours."""
        return Due.CALLER if self._caller_silence < self.limits.total else Due.TOTAL

    @property
    def _caller_silence(self) -> float:
        return math.inf if self.limits.caller_silence is None else self.limits.caller_silence

    def has_time(self, now: float) -> bool:
        """Whether there is time left to begin an answer."""
        return now < self.commit_by

    def allows_attempt(self, now: float) -> bool:
        """Whether one more attempt may start."""
        return self.attempts < self.limits.attempts and now < self.commit_by

    def share(self, started: float) -> float:
        """How long a tier asked since `started` may be silent or load while another one waits behind it, in seconds.

        An impatient caller's time is shared: it gets half of what is left, so that the next one still has a chance.
        """
        return (self.commit_by - started) / 2 if self.commit_due is Due.CALLER else math.inf

    def renewed(self, now: float) -> Budget:
        """The budget for going on with an answer that broke off: as long again as its beginning had.

        Its caller has had a byte, and is told what goes on: only silence can be too long for it.
        """
        return Budget(self.limits._replace(caller_silence=None), now, self.attempts, self._caller_silence)

    def spend(self) -> Budget:
        """The budget after one more attempt began."""
        return Budget(self.limits, self.started, self.attempts + 1, self.patience)


class Phase(NamedTuple):
    """How far an attempt is.

    `heard` is when the last frame or comment came (at first: when the attempt started). `waiting` is whether its last
    sign of life said that it queues or loads. `answered` is whether content came; `sent` whether the caller got
    anything of it; `last` whether no tier is left after it; `whole` whether the caller gets nothing before the end.
    `idle_since` is since when nothing came but keep-alives, which say that a connection lives and nothing about an
    answer; None when the last sign of life was one of the answer or of its progress.
    """

    started: float
    heard: float
    waiting: bool = False
    answered: bool = False
    sent: bool = False
    last: bool = False
    whole: bool = False
    idle_since: float | None = None


def next_deadline(budget: Budget, phase: Phase) -> Deadline:
    """The earliest deadline that applies in `phase`; silence wins a tie, for then the provider had its full time.

    A tier that used up its share of an impatient caller's time is left without blame: a spill, not a failure. The time
    to commit ends with the first token, but who waits for a whole answer goes on waiting for its first byte.
    """
    limits = budget.limits
    if phase.answered:
        silence = _silence(limits, phase, limits.inter_token)
        if not phase.whole or budget.commit_due is not Due.CALLER:
            return silence
        return min(silence, Deadline(budget.commit_by, Due.CALLER), key=_AT)
    found = [_silence(limits, phase, limits.first_token)]
    if not phase.last:
        share = budget.share(phase.started)
        heard = phase.heard if phase.idle_since is None else phase.idle_since
        found.append(Deadline(heard + share, Due.LOAD_WAIT))
        if phase.waiting:
            found.append(Deadline(phase.started + min(limits.load_wait, share), Due.LOAD_WAIT))
    if not phase.sent:
        found.append(Deadline(budget.commit_by, budget.commit_due))
    if budget.patience < math.inf:
        found.append(Deadline(phase.heard + budget.patience, Due.CALLER if phase.last else Due.LOAD_WAIT))
    return min(found, key=_AT)


def _silence(limits: Limits, phase: Phase, allowed: float) -> Deadline:
    """When the silence of a stream has lasted too long, `allowed` seconds without a word; keep-alives put it off."""
    mute = Deadline(phase.heard + allowed, Due.SILENCE)
    if phase.idle_since is None:
        return mute
    bound = phase.idle_since + max(allowed, KEEP_ALIVE_FACTOR * limits.first_token)
    return min(mute, Deadline(bound, Due.SILENCE, kept_alive=True), key=_AT)


def unary_deadline(budget: Budget, started: float, *, is_local: bool, last: bool) -> Deadline:
    """The deadline of an answer that comes whole, without a sign of life before it.

    Nothing tells whether the inference service loads the model meanwhile, so its silence is never held against it: it
    has `load_wait`, and the last tier all the time there is. A cloud loads nothing and has `first_token`.
    """
    found = [Deadline(budget.commit_by, budget.commit_due)]
    if not is_local:
        found.insert(0, Deadline(started + budget.limits.first_token, Due.SILENCE))
    if not last:
        wait = budget.limits.load_wait if is_local else math.inf
        found.append(Deadline(started + min(wait, budget.share(started)), Due.LOAD_WAIT))
    return min(found, key=_AT)
