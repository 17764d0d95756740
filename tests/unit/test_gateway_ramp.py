"""How many attempts a tier takes at once after it recovered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.breaker import ramp
from gateway.breaker.ramp import FIRST, FULL, LONGEST_SECONDS, STEP_SECONDS

MOMENTS = st.floats(0, 40, allow_nan=False)


def test_it_doubles_every_second_and_ends_after_five() -> None:
    climb = ramp.begun(100.0)
    assert [ramp.width(climb, 100.0 + seconds) for seconds in range(6)] == [2, 4, 8, 16, 32, None]


def test_each_success_is_one_more_and_so_many_are_enough() -> None:
    climb = ramp.begun(0.0)
    for _ in range(FULL - FIRST - 1):
        climb = ramp.won(climb)
    assert ramp.width(climb, 0.0) == FULL - 1
    assert ramp.width(ramp.won(climb), 0.0) is None


def test_a_failure_begins_it_anew_and_thirty_seconds_after_the_recovery_it_is_over() -> None:
    climb = ramp.lost(ramp.won(ramp.begun(0.0)), 4.0)
    assert ramp.width(climb, 4.0) == FIRST
    for second in range(30):
        climb = ramp.lost(climb, float(second))
    assert ramp.width(climb, 29.5) == FIRST
    assert ramp.width(climb, LONGEST_SECONDS) is None


@given(begun=MOMENTS, events=st.lists(st.tuples(st.booleans(), st.floats(0, 2, allow_nan=False)), max_size=60))
def test_it_never_narrows_but_by_a_failure_and_always_ends(begun: float, events: list[tuple[bool, float]]) -> None:
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
