"""When something that failed is started afresh: at once, then ever later, and when that is known to be no help."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference.devices.reopen_policy import BEYOND_AFTER, MOST_SECONDS, Reopening


def test_the_first_failure_is_forgiven_at_once_and_the_next_ones_ever_later() -> None:
    """Up to a bound, which is the longest that a machine that is well again is not seen."""
    state, pauses = Reopening(), []
    assert state.is_due(0.0)
    for _ in range(8):
        state = state.failed(100.0)
        pauses.append(state.due_at - 100.0)
        assert state.is_due(state.due_at)
        assert state.is_due(100.0) is (pauses[-1] == 0)
    assert pauses == [0, 1, 2, 4, 8, 8, 8, 8]
    assert pauses[-1] == MOST_SECONDS


def test_fresh_processes_that_are_refused_in_a_row_are_beyond_help() -> None:
    """What an old process is told is no evidence, and one other answer in between starts the count anew."""
    state = Reopening().failed(0.0)
    for _ in range(BEYOND_AFTER - 1):
        state = state.failed(0.0, is_refused=True)
    assert not state.is_beyond
    assert not state.failed(0.0).failed(0.0, is_refused=True).is_beyond
    assert state.failed(0.0, is_refused=True).is_beyond


def test_the_bound_in_words_is_the_bound_in_seconds() -> None:
    """An old process that failed, then fresh ones, each at the moment it is due."""
    state, now = Reopening().failed(0.0), 0.0
    while not state.is_beyond:
        now = state.due_at
        state = state.failed(now, is_refused=True)
    assert now == 15.0


@given(st.lists(st.tuples(st.floats(0, 1e6), st.booleans()), max_size=12))
def test_no_pause_is_longer_than_the_bound(failures: list[tuple[float, bool]]) -> None:
    state = Reopening()
    for now, is_refused in failures:
        before = state
        state = state.failed(now, is_refused=is_refused)
        assert now <= state.due_at <= now + MOST_SECONDS
        assert state.failures == before.failures + 1
        assert state.refused <= state.failures
