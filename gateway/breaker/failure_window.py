"""Counts successes and failures of one breaker over a rolling window."""

from __future__ import annotations

from typing import NamedTuple

from gateway.breaker.permits import Rule

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
