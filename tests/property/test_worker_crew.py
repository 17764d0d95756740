"""Whether a step leaves a core to others follows what steps take, on machines that a model of costs describes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.worker.cores.core_sparing import FIRST_PAUSE, IDLE, LONGEST_PAUSE, LOST, SETTLING, WINDOW, WORSE, Crew

TRIAL = SETTLING + WINDOW
COSTS = st.tuples(st.floats(1e-4, 0.1), st.floats(1e-4, 0.1))
"""Seconds of a step that spares no core, and of one that spares one."""


def driven(crew: Crew, costs: tuple[float, float], steps: int, rows: int = 1) -> list[int]:
    """What each of so many steps spared."""
    spared = []
    for _ in range(steps):
        spared.append(crew.spared)
        crew.observe(rows, costs[crew.spared])
    return spared


@pytest.mark.unmeasured
@given(COSTS, st.integers(1, 32))
def test_the_faster_way_is_found_and_the_other_one_seldom_taken(costs: tuple[float, float], rows: int) -> None:
    """With costs that stay, at most a trial's steps between two pauses go the slower way, fewer and fewer of them."""
    crew = Crew()
    driven(crew, costs, 4 * FIRST_PAUSE, rows)
    spared = driven(crew, costs, 4 * LONGEST_PAUSE, rows)
    no_matter = 0.85 < costs[1] / costs[0] < 1 / 0.85
    slower = 0 if costs[1] < costs[0] else 1
    assert no_matter or spared.count(slower) <= 10 * TRIAL
    assert no_matter or spared[-1] != slower or spared[-TRIAL:].count(slower) <= TRIAL


@pytest.mark.unmeasured
@given(COSTS, st.integers(1, 32), st.floats(0, LOST, exclude_max=True))
def test_nothing_is_tried_where_no_core_is_lost(costs: tuple[float, float], rows: int, lost: float) -> None:
    """Until steps take far longer than they did, for whatever reason."""
    crew = Crew()
    for _ in range(2 * LONGEST_PAUSE):
        crew.observe(rows, costs[0], lost=lost)
        assert crew.spared == 0
    for _ in range(WINDOW):
        crew.observe(rows, costs[0] * WORSE * 1.1, lost=lost)
    assert crew.is_trying


def test_a_trial_is_due_once_a_pause() -> None:
    crew, due = Crew(), 0
    for _ in range(10 * FIRST_PAUSE):
        due += crew.is_due
        crew.observe(1, 0.01, lost=0.0)
    assert 9 <= due <= 10
    assert not Crew(spared=1, until_trial=0).is_due


@given(st.integers(1, 32))
def test_a_trial_in_vain_is_a_short_one(rows: int) -> None:
    """Where a step with a thread fewer takes twice as long, one is spent on finding that out."""
    spared = driven(Crew(), (0.01, 0.02), FIRST_PAUSE + 4 * TRIAL, rows)
    assert spared.count(1) == 1


def test_threads_that_have_to_be_made_are_waited_for() -> None:
    """The first steps with all of them take five times as long, and then they are faster: all are used again."""
    crew = Crew(spared=1)
    since, before = SETTLING, 1
    for _ in range(FIRST_PAUSE + 4 * TRIAL):
        since = since + 1 if crew.spared == before else 0
        before = crew.spared
        slow = 5.0 if crew.spared == 0 and since < SETTLING else 1.0
        crew.observe(1, (0.01, 0.02)[crew.spared] * slow)
    assert crew.spared == 0


@given(COSTS, st.integers(0, 3000))
def test_a_change_of_the_machine_is_noticed_at_once_where_it_hurts(costs: tuple[float, float], quiet: int) -> None:
    """What suddenly takes far longer is held against the other way within a window and a trial."""
    crew = Crew()
    driven(crew, (0.001, 0.002), quiet)
    driven(crew, (0.001, 0.002), TRIAL + 1)  # a trial that was under way is over
    if crew.spared or crew.is_trying or crew.usual is None:
        return
    spared = driven(crew, (0.02, 0.002), 2 * WINDOW + TRIAL + 1)
    assert spared[-1] == 1


@given(st.integers(1, 32), st.integers(1, 32), st.integers(0, 8))
def test_a_spared_core_that_nobody_uses_is_taken_back_at_once(rows: int, others: int, doublings: int) -> None:
    """However long the next trial is away, and with another load than before; the next time is awaited longer."""
    pause = min(FIRST_PAUSE * 2**doublings, LONGEST_PAUSE)
    crew = Crew(spared=1, rows=rows, pause=pause, until_trial=pause)
    crew.observe(rows, 0.02, IDLE * 0.9)
    assert crew.spared == 1, "somebody uses it"
    crew.observe(rows, 0.02)
    assert crew.spared == 1, "nobody looked"
    crew.observe(others, 0.02, IDLE)
    assert (crew.spared, crew.rows, crew.until_trial) == (0, others, min(2 * pause, LONGEST_PAUSE))


def test_a_trial_is_judged_by_its_steps_alone() -> None:
    """A core that is idle while it is spared to find out whether that is faster says nothing yet."""
    crew = Crew()
    driven(crew, (0.01, 0.01), FIRST_PAUSE + SETTLING + 1)
    assert (crew.spared, crew.is_trying) == (1, True)
    crew.observe(1, 0.01, 1.0)
    assert crew.is_trying


def test_slow_steps_do_not_become_usual_when_one_of_them_is_quick() -> None:
    """Though nobody took a core: they are a reason for a trial, also at the time at which none would be due else."""
    crew = Crew(rows=1, usual=0.01, until_trial=WINDOW)
    for seconds in (*[0.02] * (WINDOW - 1), 0.012):
        crew.observe(1, seconds, lost=0.0)
    assert (crew.is_trying, crew.usual) == (True, 0.01)


def test_a_trial_ends_with_its_load() -> None:
    """Where it began: steps of another size say nothing of either way."""
    crew = Crew()
    driven(crew, (0.01, 0.01), FIRST_PAUSE + SETTLING + 1)
    assert (crew.spared, crew.is_trying) == (1, True)
    crew.observe(2, 0.01)
    assert (crew.spared, crew.is_trying, crew.rows) == (0, False, 2)


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(1e-5, 1.0)), max_size=400))
def test_only_steps_of_the_same_size_are_compared(steps: list[tuple[int, float]]) -> None:
    """Whatever happens, one core at most is spared, and a trial whose load changed ends where it began."""
    crew = Crew()
    for rows, seconds in steps:
        spared, ends_trial = crew.spared, crew.is_trying and rows != crew.rows
        crew.observe(rows, seconds)
        assert crew.spared in (0, 1)
        if ends_trial:
            assert not crew.is_trying
            assert crew.spared == 1 - spared
