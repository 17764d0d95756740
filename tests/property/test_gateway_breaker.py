"""Random attempts, probes, cancellations and resets: one probe at a time, and late results change nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.breaker.breaker import Breaker
from gateway.breaker.outcome import Failure, Scope
from gateway.breaker.permits import BreakerState, Permit, Refused, Rule
from gateway.breaker.probe_schedule import Finding
from gateway.breaker.state_machine import MemoryStorage

pytestmark = pytest.mark.unmeasured

ATTEMPT_SECONDS = 40.0


class BreakerMachine(RuleBasedStateMachine):
    """Keeps open permits and consecutive failures beside the breaker, and compares."""

    @initialize(failures=st.integers(1, 4), probes=st.integers(1, 2))
    def start(self, failures: int, probes: int) -> None:
        self.now = 1000.0
        self.rule = Rule(failures=failures, open=30.0, probes=probes, window=60.0, failure_ratio=0.5, min_requests=8)
        self.reported = BreakerState.CLOSED
        self.breaker = Breaker(
            "p", "m", self.rule, lambda: self.now, lambda _p, _m, state: self._report(state), MemoryStorage()
        )
        self.attempts: list[Permit] = []
        self.probes: list[Permit] = []
        self.in_a_row = 0
        self.epoch = 0
        self.confirmed: set[int] = set()

    def _report(self, state: BreakerState | None) -> None:
        assert state is not None
        self.reported = state

    def _seen(self) -> dict[str, Any]:
        entry = {**self.breaker.describe(), "state": self.breaker.state.label}
        return {key: value for key, value in entry.items() if key not in ("opens_until", "last_probe")}

    def _is_live(self, permit: Permit) -> bool:
        """Whether a result of this permit counts."""
        newest = max((other.number for other in self.attempts + self.probes if other.is_probe), default=0)
        is_newest = not permit.is_probe or permit.number == newest
        return permit.epoch == self._seen()["epoch"] and is_newest

    @rule(forced=st.booleans())
    def acquire(self, forced: bool) -> None:
        before = self._seen()
        permit = self.breaker.acquire(self.now + ATTEMPT_SECONDS, forced)
        if isinstance(permit, Refused):
            assert math.isfinite(permit.retry_in) and permit.retry_in >= 0
            if before["state"] == "closed":
                assert not forced, "a closed breaker refuses no forced attempt"
                if permit.silent:
                    assert len(self.attempts) + self.in_a_row >= self.rule.failures
                else:
                    assert permit.recovering
                    assert before["ramp"] is not None
                    assert len(self.attempts) + len(self.probes) >= before["ramp"]
            return
        assert permit.is_probe is (self.breaker.state is not BreakerState.CLOSED)
        if permit.is_probe:
            self._assert_only_probe()
        self.attempts.append(permit)

    def _assert_only_probe(self) -> None:
        """Checks that no earlier probe of this epoch is unsettled and unexpired."""
        epoch = self._seen()["epoch"]
        out = [permit for permit in self.attempts + self.probes if permit.is_probe and permit.epoch == epoch]
        assert not [permit for permit in out if self.now < permit.expires], "two probes at once"

    @rule(seconds=st.sampled_from([1.0, 50.0]))
    def acquire_recovery_probe(self, seconds: float) -> None:
        permit = self.breaker.acquire_recovery_probe(self.now + seconds)
        if permit is not None:
            assert self.breaker.state is BreakerState.OPEN
            self._assert_only_probe()
            self.probes.append(permit)

    @precondition(lambda self: self.probes)
    @rule(finding=st.sampled_from(Finding))
    def settle_recovery_probe(self, finding: Finding) -> None:
        permit = self.probes[-1]
        counts = self._is_live(permit)
        self.probes.pop()
        before, until = self._seen(), self.breaker.storage.open_until
        self.breaker.settle_recovery_probe(permit, finding, "detail")
        after = self._seen()
        assert (after["state"], after["epoch"]) == (before["state"], before["epoch"]), "only attempts change the state"
        if not counts or finding is Finding.UNKNOWN:
            assert self.breaker.storage.open_until == until
        elif finding is Finding.GOOD:
            assert self.breaker.open_for is None
        else:
            assert (self.breaker.open_for or 0.0) >= 10.0

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), ok=st.booleans(), pause=st.sampled_from([None, None, 5.0, 100.0]), opens=st.booleans())
    def settle(self, data: st.DataObject, ok: bool, pause: float | None, opens: bool) -> None:
        index = data.draw(st.integers(0, len(self.attempts) - 1))
        permit = self.attempts[index]
        counts = self._is_live(permit)
        del self.attempts[index]
        ok = ok and permit.number not in self.confirmed  # its success was recorded at the first token
        opens = opens and pause is not None
        before = self._seen()
        if ok:
            self.breaker.succeed(permit)
        else:
            self.breaker.fail(permit, Failure(Scope.PAIR, pause, opens=opens), "reason")
        after, state = self._seen(), self.breaker.state
        if not counts:
            assert {**after, "probing": before["probing"]} == before, "a late result changed the breaker"
            return
        self.in_a_row = 0 if ok else self.in_a_row + 1
        if ok:
            assert state is BreakerState.CLOSED or before["state"] == "half-open"
        elif before["state"] == "half-open" or opens or self.in_a_row >= self.rule.failures:
            assert state is BreakerState.OPEN
            expected = pause if opens and pause is not None else max(pause or 0.0, self.rule.open)
            assert self.breaker.open_for == pytest.approx(expected)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def confirm_probe(self, data: st.DataObject) -> None:
        """At the first token the success of a live probe counts, and another probe may run."""
        index = data.draw(st.integers(0, len(self.attempts) - 1))
        permit = self.attempts[index]
        is_live_probe = permit.is_probe and self._is_live(permit)
        before = self._seen()
        renewed = self.breaker.confirm_probe(permit)
        if not is_live_probe:
            assert renewed is permit
            assert self._seen() == before, "an ordinary or late permit changed the breaker"
            return
        assert not renewed.is_probe
        assert not self._seen()["probing"]
        assert self.breaker.state is BreakerState.CLOSED or (
            self.rule.probes > 1 and self.breaker.state is BreakerState.HALF_OPEN
        )
        self.attempts[index] = renewed
        self.confirmed.add(renewed.number)
        self.in_a_row = 0

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        permit = self.attempts.pop(data.draw(st.integers(0, len(self.attempts) - 1)))
        before = self._seen()
        self.breaker.release(permit)
        assert {**self._seen(), "probing": before["probing"]} == before, "a cancelled attempt changed the breaker"

    @rule(seconds=st.sampled_from([0.125, 4.0, 31.0, 61.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def reset(self) -> None:
        self.breaker.reset()
        assert self.breaker.state is BreakerState.CLOSED

    @rule(state=st.sampled_from(["open", "closed", "half-open"]))
    def change_elsewhere(self, state: str) -> None:
        """Another process with the same storage changes the state."""
        self.breaker.storage.open_until = self.now + 30.0
        self.breaker.storage.state = state

    @invariant()
    def state_is_consistent_and_never_stuck(self) -> None:
        if not hasattr(self, "breaker"):
            return
        assert self.breaker.state.label == self.breaker.storage.state
        assert self.breaker.state is self.reported, "each change is reported"
        is_over = self.breaker.state is BreakerState.OPEN and self.now >= self.breaker.storage.open_until
        assert self.breaker.describe()["state"] == ("half-open" if is_over else self.breaker.state.label)
        assert self.breaker.outstanding == len(self.attempts) + len(self.probes)
        open_for = self.breaker.open_for
        assert open_for is None or open_for <= 100.0
        if self._seen()["epoch"] != self.epoch:
            self.epoch = self._seen()["epoch"]
            self.in_a_row = 0

    def teardown(self) -> None:
        """When all attempts have expired, successful probes close the breaker."""
        if not hasattr(self, "breaker"):
            return
        self.now += 200.0
        for _ in range(self.rule.probes):
            permit = self.breaker.acquire(self.now + ATTEMPT_SECONDS)
            assert isinstance(permit, Permit), "no probe is possible"
            self.breaker.succeed(permit)
        assert self.breaker.state is BreakerState.CLOSED


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=150, stateful_step_count=40)
