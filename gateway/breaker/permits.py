"""Permits of one breaker: which attempts run, whether their results still count, and which one is the probe.

pybreaker admits every call while half-open and lets late results change a newer state. Permits add what concurrent,
cancellable attempts need: a result counts only in the epoch of its permit, each state change begins a new epoch, and at
most one unexpired permit belongs to a probe.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

ONE_EVENT_SECONDS = 1.0
"""Concurrent attempts that break within this time were broken by one event, which counts as one failure."""


class BreakerState(IntEnum):
    """A breaker's state; the number is the value of `gateway_breaker_state`."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2

    @property
    def label(self) -> str:
        """The name for operators: closed, half-open, open."""
        return self.name.lower().replace("_", "-")


CLOSED, HALF_OPEN, OPEN = BreakerState
"""Module constants for the hot path: Python 3.11 is slow to look up a member of an enum."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When a breaker opens and for how long. `open` and `window` are seconds.

    It opens after `failures` failures in a row, or when a share of `failure_ratio` of at least `min_requests` attempts
    within `window` failed. `probes` successes in a row close it again.
    """

    failures: int = 5
    open: float = 30.0
    probes: int = 1
    window: float = 60.0
    failure_ratio: float = 0.5
    min_requests: int = 20


class Permit(NamedTuple):
    """The right to make one attempt until `expires` (monotonic seconds).

    `on_trial`: the rest of a probe's attempt whose first content was recorded as the recovery.
    """

    epoch: int
    number: int
    is_probe: bool
    expires: float
    on_trial: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """No attempt now: the name of the breaker that refused it, and in how many seconds a new try may succeed.

    `recovering`: the breaker is closed and its ramp is full. `silent`: it is closed, and too many attempts wait without
    a sign of life. A forced attempt passes both.
    """

    by: str
    retry_in: float
    recovering: bool = False
    silent: bool = False


class Permits:
    """The permits of one breaker."""

    __slots__ = ("_event_at", "_event_newest", "_issued", "epoch", "outstanding", "probe")

    def __init__(self) -> None:
        self.epoch = 0
        self.outstanding = 0
        """Permits that were issued and not returned."""
        self.probe: Permit | None = None
        self._issued = 0
        self._event_at = 0.0
        self._event_newest = 0

    def new_epoch(self) -> None:
        """The state changed: results of permits that were issued before do not count."""
        self.epoch += 1
        self.probe = None
        self._event_newest = 0

    def issue(self, expires: float, *, is_probe: bool = False) -> Permit:
        """A permit for one attempt."""
        self._issued = number = self._issued + 1
        self.outstanding += 1
        permit = Permit(self.epoch, number, is_probe, expires)
        if is_probe:
            self.probe = permit
        return permit

    def renew(self, permit: Permit, *, on_trial: bool) -> Permit:
        """A permit of the present epoch for the rest of a probe's attempt, after its success was recorded.

        It is not a probe's. `on_trial`: a failure before any other attempt succeeds takes the recovery back.
        """
        self._issued += 1
        return Permit(self.epoch, self._issued, False, permit.expires, on_trial)

    def is_probing(self, now: float) -> bool:
        """Whether a probe is running: a user's attempt, or a probe of the gateway."""
        return self.probe is not None and now < self.probe.expires

    def counts(self, permit: Permit) -> bool:
        """Whether a result under `permit` still counts."""
        return permit.epoch == self.epoch and (not permit.is_probe or self.probe is permit)

    def release_probe(self, permit: Permit) -> None:
        """Another attempt may be the probe, if `permit` was."""
        if self.probe is permit:
            self.probe = None

    def is_new_event(self, permit: Permit, now: float) -> bool:
        """Whether the break of a running attempt at `now` counts: the first one of an event does.

        One crash breaks all attempts that run at the time, so that later breaks of those are the same event.
        """
        if permit.number <= self._event_newest and now - self._event_at < ONE_EVENT_SECONDS:
            return False
        self._event_at, self._event_newest = now, self._issued
        return True
