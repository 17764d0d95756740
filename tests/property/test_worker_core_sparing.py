"""The core sparing policy, driven with the step costs of simulated machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.worker.engine.core_sparing import (
    FIRST_PAUSE,
    IDLE,
    LONGEST_PAUSE,
    LOST,
    SETTLING,
    WINDOW,
    WORSE,
    CoreSparing,
)

TRIAL = SETTLING + WINDOW
COSTS = st.tuples(st.floats(1e-4, 0.1), st.floats(1e-4, 0.1))
"""Seconds of a step without and with a spared core."""


def driven(sparing: CoreSparing, costs: tuple[float, float], steps: int, rows: int = 1) -> list[int]:
    """Returns the number of spared cores of each step."""
    spared = []
    for _ in range(steps):
        spared.append(sparing.spared)
        sparing.observe(rows, costs[sparing.spared])
    return spared


@pytest.mark.unmeasured
@given(COSTS, st.integers(1, 32))
def test_with_constant_costs_the_faster_number_of_threads_is_used(costs: tuple[float, float], rows: int) -> None:
    """Slower steps occur in trials only."""
    sparing = CoreSparing()
    driven(sparing, costs, 4 * FIRST_PAUSE, rows)
    spared = driven(sparing, costs, 4 * LONGEST_PAUSE, rows)
    is_close = 0.85 < costs[1] / costs[0] < 1 / 0.85
    slower = 0 if costs[1] < costs[0] else 1
    assert is_close or spared.count(slower) <= 10 * TRIAL
    assert is_close or spared[-1] != slower or spared[-TRIAL:].count(slower) <= TRIAL


@pytest.mark.unmeasured
@given(COSTS, st.integers(1, 32), st.floats(0, LOST, exclude_max=True))
def test_no_trial_begins_without_a_lost_core_or_slower_steps(
    costs: tuple[float, float], rows: int, lost: float
) -> None:
    sparing = CoreSparing()
    for _ in range(2 * LONGEST_PAUSE):
        sparing.observe(rows, costs[0], lost=lost)
        assert sparing.spared == 0
    for _ in range(WINDOW):
        sparing.observe(rows, costs[0] * WORSE * 1.1, lost=lost)
    assert sparing.before


def test_one_trial_is_due_per_pause() -> None:
    sparing, due = CoreSparing(), 0
    for _ in range(10 * FIRST_PAUSE):
        due += sparing.is_due
        sparing.observe(1, 0.01, lost=0.0)
    assert 9 <= due <= 10
    assert not CoreSparing(spared=1, until_trial=0).is_due


@given(st.integers(1, 32))
def test_a_trial_ends_after_one_step_of_twice_the_time(rows: int) -> None:
    spared = driven(CoreSparing(), (0.01, 0.02), FIRST_PAUSE + 4 * TRIAL, rows)
    assert spared.count(1) == 1


def test_slow_first_steps_after_a_change_are_not_measured() -> None:
    """Creating threads makes the first steps five times as slow."""
    sparing = CoreSparing(spared=1)
    since, before = SETTLING, 1
    for _ in range(FIRST_PAUSE + 4 * TRIAL):
        since = since + 1 if sparing.spared == before else 0
        before = sparing.spared
        slow = 5.0 if sparing.spared == 0 and since < SETTLING else 1.0
        sparing.observe(1, (0.01, 0.02)[sparing.spared] * slow)
    assert sparing.spared == 0


@given(COSTS, st.integers(0, 3000))
def test_suddenly_slower_steps_start_a_trial(costs: tuple[float, float], quiet: int) -> None:
    sparing = CoreSparing()
    driven(sparing, (0.001, 0.002), quiet)
    driven(sparing, (0.001, 0.002), TRIAL + 1)  # ends a running trial
    if sparing.spared or sparing.before or sparing.usual is None:
        return
    spared = driven(sparing, (0.02, 0.002), 2 * WINDOW + TRIAL + 1)
    assert spared[-1] == 1


@given(st.integers(1, 32), st.integers(1, 32), st.integers(0, 8))
def test_an_idle_spared_core_is_taken_back_at_once(rows: int, others: int, doublings: int) -> None:
    """The pause before the next trial does not matter, and doubles."""
    pause = min(FIRST_PAUSE * 2**doublings, LONGEST_PAUSE)
    sparing = CoreSparing(spared=1, rows=rows, pause=pause, until_trial=pause)
    sparing.observe(rows, 0.02, IDLE * 0.9)
    assert sparing.spared == 1, "the core is in use"
    sparing.observe(rows, 0.02)
    assert sparing.spared == 1, "not measured"
    sparing.observe(others, 0.02, IDLE)
    assert (sparing.spared, sparing.rows, sparing.until_trial) == (0, others, min(2 * pause, LONGEST_PAUSE))


def test_an_idle_core_does_not_end_a_trial() -> None:
    sparing = CoreSparing()
    driven(sparing, (0.01, 0.01), FIRST_PAUSE + SETTLING + 1)
    assert (sparing.spared, bool(sparing.before)) == (1, True)
    sparing.observe(1, 0.01, 1.0)
    assert sparing.before


def test_slower_steps_start_a_trial_despite_one_quick_step() -> None:
    sparing = CoreSparing(rows=1, usual=0.01, until_trial=WINDOW)
    for seconds in (*[0.02] * (WINDOW - 1), 0.012):
        sparing.observe(1, seconds, lost=0.0)
    assert (bool(sparing.before), sparing.usual) == (True, 0.01)


def test_another_batch_size_ends_a_trial_without_a_result() -> None:
    sparing = CoreSparing()
    driven(sparing, (0.01, 0.01), FIRST_PAUSE + SETTLING + 1)
    assert (sparing.spared, bool(sparing.before)) == (1, True)
    sparing.observe(2, 0.01)
    assert (sparing.spared, sparing.before, sparing.rows) == (0, (), 2)


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(1e-5, 1.0)), max_size=400))
def test_only_steps_of_the_same_size_are_compared(steps: list[tuple[int, float]]) -> None:
    """At most one core is spared, and a trial ends without a change when the batch size changes."""
    sparing = CoreSparing()
    for rows, seconds in steps:
        spared, ends_trial = sparing.spared, bool(sparing.before) and rows != sparing.rows
        sparing.observe(rows, seconds)
        assert sparing.spared in (0, 1)
        if ends_trial:
            assert not sparing.before
            assert sparing.spared == 1 - spared
