"""What one breaker has beside pybreaker's state machine: permits, the failure window, and the ramp after a recovery.

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

    It opens after `failures` consecutive failures, or when at least `min_requests` attempts ended within `window` and a
    share of `failure_ratio` of them failed. `probes` consecutive successes close it again.
    """

    failures: int = 5
    open: float = 30.0
    probes: int = 1
    window: float = 60.0
    failure_ratio: float = 0.5
    min_requests: int = 20


class Permit(NamedTuple):
    """The right to make one attempt until `expires` (monotonic seconds).

    `can_undo_recovery`: a failure opens the breaker again, if no other attempt has succeeded since the recovery. It is
    set for the rest of a probe's attempt, whose first content was recorded as the recovery.
    """

    epoch: int
    number: int
    is_probe: bool
    expires: float
    can_undo_recovery: bool = False


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

    def renew(self, permit: Permit, *, can_undo_recovery: bool) -> Permit:
        """A permit of the present epoch for the rest of a probe's attempt, after its success was recorded.

        It is not the permit of a probe.
        """
        self._issued += 1
        return Permit(self.epoch, self._issued, False, permit.expires, can_undo_recovery)

    def is_probing(self, now: float) -> bool:
        """Whether a probe is running: a user's attempt, or a probe of the gateway."""
        return self.probe is not None and now < self.probe.expires

    def counts(self, permit: Permit) -> bool:
        """Whether a result under `permit` still counts."""
        return permit.epoch == self.epoch and (not permit.is_probe or self.probe is permit)

    def release_probe(self, permit: Permit) -> None:
        """Allows another probe, if `permit` belonged to the probe."""
        if self.probe is permit:
            self.probe = None

    def is_new_event(self, permit: Permit, now: float) -> bool:
        """Whether the break of a running attempt at `now` counts. Only the first break of an event counts.

        One crash breaks all attempts that run at the time, so their later breaks belong to the same event.
        """
        if permit.number <= self._event_newest and now - self._event_at < ONE_EVENT_SECONDS:
            return False
        self._event_at, self._event_newest = now, self._issued
        return True


_BUCKETS = 10
"""The window moves in tenths of its length."""


class Counts(NamedTuple):
    """Results within the window."""

    succeeded: int
    failed: int


class FailureWindow:
    """Results in buckets of a tenth of the window: `[slot, succeeded, failed]`, oldest first."""

    __slots__ = ("_buckets",)

    def __init__(self) -> None:
        self._buckets: list[list[int]] = []

    def clear(self) -> None:
        """Forget all results."""
        self._buckets.clear()

    def add(self, rule: Rule, now: float, *, failed: bool) -> None:
        """Count one result at `now` (monotonic seconds)."""
        slot = int(now * _BUCKETS / rule.window)
        buckets = self._buckets
        if not buckets or buckets[-1][0] != slot:
            buckets[:] = [bucket for bucket in buckets if slot - bucket[0] < _BUCKETS]
            buckets.append([slot, 0, 0])
        buckets[-1][2 if failed else 1] += 1

    @property
    def counts(self) -> Counts:
        """All results in the window, as of the last one."""
        return Counts(sum(bucket[1] for bucket in self._buckets), sum(bucket[2] for bucket in self._buckets))

    def exceeds(self, rule: Rule) -> bool:
        """Whether the share of failures opens the breaker."""
        succeeded, failed = self.counts
        seen = succeeded + failed
        return seen >= rule.min_requests and failed >= rule.failure_ratio * seen


RAMP_FIRST = 2
"""Concurrent attempts right after the recovery."""
RAMP_STEP_SECONDS = 1.0
"""The width doubles after each step."""
RAMP_FULL = 64
"""From this width on there is no limit."""
RAMP_SECONDS = 30.0
"""There is no limit this long after the recovery."""


class Ramp:
    """Limits the concurrent attempts after a recovery at `now`. A success increases the limit, a failure resets it."""

    def __init__(self, now: float) -> None:
        self._recovered = self._began = now
        self.successes = 0
        """Successes since the ramp last began."""

    def succeeded(self) -> None:
        """Record a success."""
        self.successes += 1

    def failed(self, now: float) -> None:
        """Record a failure."""
        self._began, self.successes = now, 0

    def width(self, now: float) -> int | None:
        """The number of concurrent attempts at `now`; None when there is no limit and the ramp is over."""
        doublings = int((now - self._began) / RAMP_STEP_SECONDS)
        if now - self._recovered >= RAMP_SECONDS or doublings >= RAMP_FULL.bit_length():
            return None
        wide = (RAMP_FIRST << max(0, doublings)) + self.successes
        return None if wide >= RAMP_FULL else wide
