"""One crash of a worker with many requests in flight opened its breaker at once."""

from __future__ import annotations

from gateway.breaker.breakers import Breakers, Lease
from gateway.breaker.outcome import Observation, judge
from gateway.breaker.permits import ONE_EVENT_SECONDS, Rule, State
from gateway.errors import UpstreamKind

CRASH = judge(Observation(UpstreamKind.ERROR_FRAME, status=503, code="model_failed", is_local=True))
CUT = judge(Observation(UpstreamKind.READ, is_local=True))
REFUSAL = judge(Observation(UpstreamKind.STATUS, status=503, code="memory_limit_exceeded", is_local=True))


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _leases(breakers: Breakers, count: int) -> list[Lease]:
    found = [breakers.acquire("local", "demo", expires=1e9) for _ in range(count)]
    assert all(isinstance(lease, Lease) for lease in found)
    return [lease for lease in found if isinstance(lease, Lease)]


def test_crash_under_twenty_requests_is_one_failure() -> None:
    clock = _Clock()
    breakers = Breakers(Rule(), clock)
    for lease in _leases(breakers, 20):
        lease.settle(CRASH)
        clock.now += 0.01
    assert breakers.breaker("local", "demo").describe()["failures"] == 1
    assert set(breakers.states().values()) == {State.CLOSED}


def test_five_crashes_in_a_row_open_breaker() -> None:
    clock = _Clock()
    breakers = Breakers(Rule(), clock)
    for _ in range(5):
        for lease in _leases(breakers, 3):
            lease.settle(CRASH)
    assert breakers.breaker("local", "demo").state is State.OPEN


def test_later_break_is_another_event() -> None:
    clock = _Clock()
    breakers = Breakers(Rule(), clock)
    first, second = _leases(breakers, 2)
    first.settle(CUT)
    clock.now += ONE_EVENT_SECONDS
    second.settle(CUT)
    assert breakers.breaker("local").describe()["failures"] == 2


def test_concurrent_refusals_count_each() -> None:
    breakers = Breakers(Rule(), _Clock())
    for lease in _leases(breakers, 5):
        lease.settle(REFUSAL)
    assert breakers.breaker("local", "demo").state is State.OPEN
