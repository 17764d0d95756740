"""The breaker with pybreaker inside: one probe at a time, never stuck, results of an older epoch count for nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.breaker import ramp as ramps
from gateway.breaker.guard import Guard
from gateway.breaker.outcome import Failure, Scope
from gateway.breaker.permits import Permit, Refusal, Rule, State
from gateway.breaker.probe_schedule import Finding

pytestmark = pytest.mark.unmeasured

LIFE = 40.0


class Breaker(RuleBasedStateMachine):
    """A model beside the real thing: it counts what should count and compares."""

    @initialize(failures=st.integers(1, 4), probes=st.integers(1, 2))
    def start(self, failures: int, probes: int) -> None:
        self.now = 1000.0
        self.rule = Rule(failures=failures, open=30.0, probes=probes, window=60.0, failure_ratio=0.5, min_requests=8)
        self.moves: list[State] = []
        self.guard = Guard("p", "m", self.rule, lambda: self.now, lambda _p, _m, state: self._moved(state))
        self.out: list[tuple[Permit, State]] = []
        self.scouts: list[Permit] = []
        self.in_a_row = 0
        self.proven: set[int] = set()

    def _moved(self, state: State | None) -> None:
        assert state is not None
        self.moves.append(state)

    @rule(forced=st.booleans())
    def ask(self, forced: bool) -> None:
        before, running = self.guard.book.state, self.guard.outstanding
        ramp = self.guard.book.ramp
        width = None if ramp is None else ramps.width(ramp, self.now)
        answer = self.guard.ask(self.now + LIFE, forced)
        if isinstance(answer, Refusal):
            if before is State.CLOSED:
                assert not forced, "who has nowhere else to go is refused by no closed breaker"
                if answer.silent:
                    assert len(self.out) + self.in_a_row >= self.rule.failures, "silence speaks as failures do"
                    return
                assert width is not None
                assert running >= width, "only a full ramp refuses while it is closed"
            assert math.isfinite(answer.retry_in), "a refusal ends some day"
            assert answer.retry_in >= 0
            return
        if answer.is_probe:
            self._is_the_only_one()
        self.out.append((answer, self.guard.book.state))

    def _is_the_only_one(self) -> None:
        permits = [permit for permit, _ in self.out] + self.scouts
        assert not [permit for permit in permits if permit.is_probe and self._is_alive(permit)], "two probes at once"

    def _is_alive(self, permit: Permit) -> bool:
        """Whether `permit` was given in this epoch and neither came back nor ran out."""
        return permit.epoch == self.guard.book.epoch and self.now < permit.expires

    @rule(life=st.sampled_from([1.0, 50.0]))
    def scout(self, life: float) -> None:
        """We ask the tier ourselves, if it is open and nobody else does."""
        permit = self.guard.scout(self.now + life)
        if permit is not None:
            assert self.guard.book.state is State.OPEN
            self._is_the_only_one()
            self.scouts.append(permit)

    @precondition(lambda self: self.scouts)
    @rule(finding=st.sampled_from(Finding))
    def find_out(self, finding: Finding) -> None:
        permit = self.scouts.pop()
        counts, before = self._counts(permit) or self.guard.book.probe == permit, self.guard.book
        self.guard.scouted(permit, finding, "said")
        after = self.guard.book
        assert (after.state, after.epoch) == (before.state, before.epoch), "only attempts move the breaker"
        if not counts:
            assert after is before
        elif finding is Finding.GOOD:
            assert self.guard.closed_for is None
        elif finding is Finding.BAD:
            assert (self.guard.closed_for or 0.0) >= 10.0
        else:
            assert after.open_until == before.open_until

    def _counts(self, permit: Permit) -> bool:
        """Whether `permit` may still move the breaker and has not run out."""
        return permit.epoch == self.guard.book.epoch and self.guard.book.probe == permit and self.now < permit.expires

    @precondition(lambda self: self.out)
    @rule(data=st.data(), ok=st.booleans(), pause=st.sampled_from([None, None, 5.0, 100.0]), opens=st.booleans())
    def settle(self, data: st.DataObject, ok: bool, pause: float | None, opens: bool) -> None:
        permit, _ = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        ok = ok and permit.number not in self.proven  # its success was recorded when the answer began
        book = self.guard.book
        stale = permit.epoch != book.epoch or (permit.is_probe and book.probe != permit)
        before, epoch = book.state, book.epoch
        if ok:
            self.guard.succeed(permit)
        else:
            self.guard.fail(permit, Failure(Scope.PAIR, pause, opens=opens and pause is not None), "said")
        after = self.guard.book.state
        if stale:
            assert (after, self.guard.book.epoch) == (before, epoch), "a late result moved the breaker"
        elif ok:
            assert after in ((State.CLOSED,) if before is State.CLOSED else (State.CLOSED, State.HALF_OPEN))
        elif before is State.HALF_OPEN or (opens and pause is not None):
            assert after is State.OPEN
            expected = pause if opens and pause is not None else max(pause or 0.0, 30.0)
            assert self.guard.closed_for == expected
        if not stale:
            self.in_a_row = 0 if ok else self.in_a_row + 1
            if not ok and self.in_a_row >= self.rule.failures:
                assert after is State.OPEN

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def begin_to_answer(self, data: st.DataObject) -> None:
        """Content came under a permit: a live probe's success counts now, and its place is free for others."""
        index = data.draw(st.integers(0, len(self.out) - 1))
        permit, asked_in = self.out[index]
        book = self.guard.book
        live = permit.is_probe and permit.epoch == book.epoch and book.probe == permit
        fresh = self.guard.prove(permit)
        if not live:
            assert fresh is permit
            assert self.guard.book is book, "an ordinary or late permit moved the breaker"
            return
        assert not fresh.is_probe
        assert self.guard.book.probe is None
        assert self.guard.book.state in (State.CLOSED, State.HALF_OPEN)
        assert (self.guard.book.state is State.CLOSED) or self.rule.probes > 1
        self.out[index] = (fresh, asked_in)
        self.proven.add(fresh.number)
        self.in_a_row = 0

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        permit, _ = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        before, epoch = self.guard.book.state, self.guard.book.epoch
        self.guard.give_back(permit)
        assert (self.guard.book.state, self.guard.book.epoch) == (before, epoch), "a cancellation moved the breaker"

    @rule(seconds=st.sampled_from([0.125, 4.0, 31.0, 61.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def reset(self) -> None:
        self.guard.reset()
        assert self.guard.book.state is State.CLOSED

    @invariant()
    def it_is_never_stuck(self) -> None:
        if not hasattr(self, "guard"):
            return
        assert self.guard.outstanding == len(self.out) + len(self.scouts)
        closed_for = self.guard.closed_for
        assert closed_for is None or closed_for <= 100.0
        if self.guard.book.state is not State.CLOSED:
            self.in_a_row = 0 if self.guard.book.state is State.HALF_OPEN else self.in_a_row
        if self.guard.book.epoch != getattr(self, "epoch", 0):
            self.epoch = self.guard.book.epoch
            self.in_a_row = 0

    def teardown(self) -> None:
        """Whatever happened: once everybody is gone and time passes, one good probe after the other closes it."""
        if not hasattr(self, "guard"):
            return
        self.now += 200.0
        for _ in range(self.rule.probes):
            answer = self.guard.ask(self.now + LIFE)
            assert isinstance(answer, Permit), "stuck"
            self.guard.succeed(answer)
        assert self.guard.book.state is State.CLOSED


TestBreaker = Breaker.TestCase
TestBreaker.settings = settings(max_examples=150, stateful_step_count=40)
