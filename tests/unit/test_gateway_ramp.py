"""The number of concurrent attempts after a recovery."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.breaker import ramp
from gateway.breaker.ramp import FIRST, FULL, LONGEST_SECONDS, STEP_SECONDS

MOMENTS = st.floats(0, 40, allow_nan=False)


def test_ramp_doubles_every_second_and_ends() -> None:
    climb = ramp.begun(100.0)
    assert [ramp.width(climb, 100.0 + seconds) for seconds in range(6)] == [2, 4, 8, 16, 32, None]


def test_each_success_widens_ramp_by_one() -> None:
    climb = ramp.begun(0.0)
    for _ in range(FULL - FIRST - 1):
        climb = ramp.won(climb)
    assert ramp.width(climb, 0.0) == FULL - 1
    assert ramp.width(ramp.won(climb), 0.0) is None


def test_failure_restarts_ramp_within_thirty_seconds() -> None:
    climb = ramp.lost(ramp.won(ramp.begun(0.0)), 4.0)
    assert ramp.width(climb, 4.0) == FIRST
    for second in range(30):
        climb = ramp.lost(climb, float(second))
    assert ramp.width(climb, 29.5) == FIRST
    assert ramp.width(climb, LONGEST_SECONDS) is None


@given(begun=MOMENTS, events=st.lists(st.tuples(st.booleans(), st.floats(0, 2, allow_nan=False)), max_size=60))
def test_ramp_narrows_only_by_failure_and_always_ends(begun: float, events: list[tuple[bool, float]]) -> None:
    climb, now, before = ramp.begun(begun), begun, FIRST
    for ok, pause in events:
        now += pause
        wide = ramp.width(climb, now)
        if wide is None:
            break
        assert FIRST <= before <= wide < FULL
        climb, before = (ramp.won(climb), wide) if ok else (ramp.lost(climb, now), FIRST)
    assert ramp.width(climb, max(now, begun) + LONGEST_SECONDS) is None
    assert ramp.width(climb, now + 7 * STEP_SECONDS) is None
