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
    before the next tier is tried. `caller_silence` is how long the caller waits for an answer to begin, `caller_gap`
    how long it waits for the next byte of one that has begun; None where it named none.
    """

    first_token: float
    inter_token: float
    total: float
    load_wait: float
    attempts: int
    caller_silence: float | None = None
    caller_gap: float | None = None


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

    `waited` is what had passed of the caller's time when the request `started`. `quiet_since` is when the caller, who
    has had a part of the answer, got the last byte of it; None as long as it has had none.
    """

    limits: Limits
    started: float
    attempts: int = 0
    waited: float = 0.0
    quiet_since: float | None = None

    @property
    def caller_leaves(self) -> float:
        """When the caller stops waiting for an answer to begin."""
        silence = self.limits.caller_silence
        return math.inf if silence is None or self.quiet_since is not None else self.started - self.waited + silence

    @property
    def commit_by(self) -> float:
        """When something must have been sent to the caller."""
        return min(self.started + self.limits.total, self.caller_leaves)

    @property
    def commit_due(self) -> Due:
        """Whose limit `commit_by` is: the caller's or ours."""
        return Due.CALLER if self.caller_leaves < self.started + self.limits.total else Due.TOTAL

    @property
    def patience(self) -> float:
        """How long the caller, who has had a part of the answer, may be left without another byte."""
        return math.inf if self.limits.caller_gap is None else self.limits.caller_gap

    @property
    def is_impatient(self) -> bool:
        """Whether the caller's own limit between two bytes may count before ours between two tokens."""
        return self.patience < 2 * self.limits.inter_token

    def quiet_left(self, now: float) -> float:
        """How much longer the caller waits for the rest of an answer that broke off."""
        return math.inf if self.quiet_since is None else self.quiet_since + self.patience - now

    def has_time(self, now: float) -> bool:
        """Whether there is time left to begin an answer, or to go on with it."""
        return now < self.commit_by and self.quiet_left(now) > 0

    def whose_time(self, now: float) -> str:
        """Whose time for an answer to begin is over first, or is over at `now`; for people."""
        if self.commit_due is Due.CALLER or now >= self.caller_leaves:
            return f"the caller's own time-out of {self.limits.caller_silence:g} s"
        return f"the {self.limits.total:g} s that a request has (deadlines.total)"

    def allows_attempt(self, now: float) -> bool:
        """Whether one more attempt may start."""
        return self.attempts < self.limits.attempts and now < self.commit_by

    def share(self, started: float) -> float:
        """How long a tier asked since `started` may be silent or load while another one waits behind it, in seconds.

        An impatient caller's time is shared: it gets half of what is left, so that the next one still has a chance.
        """
        return (self.commit_by - started) / 2 if self.commit_due is Due.CALLER else math.inf

    def renewed(self, now: float, quiet_since: float) -> Budget:
        """The budget for going on with an answer that broke off: as long again as its beginning had.

        Its caller, who got the last byte at `quiet_since`, is told what goes on: only silence can be too long for it.
        """
        return Budget(self.limits, now, self.attempts, self.waited, quiet_since)

    def spend(self) -> Budget:
        """The budget after one more attempt began."""
        return Budget(self.limits, self.started, self.attempts + 1, self.waited, self.quiet_since)


class Phase(NamedTuple):
    """How far an attempt is.

    `heard` is when the last frame or comment came (at first: when the attempt started). `waiting` is whether its last
    sign of life said that it queues or loads. `answered` is whether content came; `sent` whether the caller got
    anything of it; `last` whether nobody is left who could answer, or go on, after it; `whole` whether the caller gets
    nothing before the end; `opened` whether its stream is open, of which a caller that waits for the rest is told.
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
    opened: bool = True


def next_deadline(budget: Budget, phase: Phase) -> Deadline:
    """The earliest deadline that applies in `phase`; silence wins a tie, for then the provider had its full time.

    A tier that used up its share of an impatient caller's time is left without blame: a spill, not a failure. Our own
    time to commit ends with the first token, but who waits for a whole answer goes on waiting for its first byte.
    """
    limits = budget.limits
    if phase.answered:
        silence = _silence(limits, phase, limits.inter_token)
        impatience = Deadline(budget.caller_leaves, Due.CALLER) if phase.whole else _impatience(budget, phase)
        return min(silence, impatience, key=_AT)
    found = [_silence(limits, phase, limits.first_token)]
    if not phase.last:
        share = budget.share(phase.started)
        heard = phase.heard if phase.idle_since is None else phase.idle_since
        found.append(Deadline(heard + share, Due.LOAD_WAIT))
        if phase.waiting:
            found.append(Deadline(phase.started + min(limits.load_wait, share), Due.LOAD_WAIT))
    if not phase.sent:
        found.append(Deadline(budget.commit_by, budget.commit_due))
    if phase.sent or budget.quiet_since is not None:
        found.append(_impatience(budget, phase))
    return min(found, key=_AT)


def _impatience(budget: Budget, phase: Phase) -> Deadline:
    """When the caller, who has had a part of the answer, is left without a byte too long.

    Half of the time is kept for whoever could go on; where nobody could, all of it is waited for.
    """
    quiet_since = phase.heard if phase.opened or budget.quiet_since is None else budget.quiet_since
    gone = quiet_since + budget.patience
    return Deadline(gone, Due.CALLER) if phase.last else Deadline((phase.heard + gone) / 2, Due.LOAD_WAIT)


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
