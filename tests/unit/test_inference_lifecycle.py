"""States of a model, the backoff of failures, and Retry-After: memory, load and queue time."""

from __future__ import annotations

import itertools

import pytest

from inference.authority.lifecycle import (
    TABLE,
    Action,
    Backoff,
    Departure,
    IllegalTransition,
    ModelEvent,
    Reason,
    advance,
)
from inference.authority.wait_queue import (
    Pace,
    expected_load_seconds,
    load_seconds_left,
    queue_seconds,
    retry_after_seconds,
)
from inference.protocol import ModelState
from inference.tools.state_diagrams import BEGIN, DOCUMENT, END, rewritten


@pytest.mark.parametrize(("state", "event"), list(itertools.product(ModelState, ModelEvent)))
def test_transitions_are_those_of_the_table(state: ModelState, event: ModelEvent) -> None:
    if (state, event) in TABLE:
        assert advance(state, event) is TABLE[state, event]
    else:
        with pytest.raises(IllegalTransition, match=f"a {state} model cannot {event}"):
            advance(state, event)


def test_typical_lifecycle_passes_the_expected_states() -> None:
    state = ModelState.COLD
    for event, then in (
        (ModelEvent.LOAD, ModelState.LOADING),
        (ModelEvent.LOADED, ModelState.READY),
        (ModelEvent.USED, ModelState.BUSY),
        (ModelEvent.IDLE, ModelState.READY),
        (ModelEvent.DRAIN, ModelState.DRAINING),
        (ModelEvent.UNLOAD, ModelState.UNLOADING),
        (ModelEvent.EXITED, ModelState.COLD),
        (ModelEvent.LOAD, ModelState.LOADING),
        (ModelEvent.FAIL, ModelState.FAILED),
        (ModelEvent.RETRY, ModelState.COLD),
    ):
        state = advance(state, event)
        assert state is then


def test_all_states_can_be_reached_and_left() -> None:
    reached = {ModelState.COLD}
    while (more := {to for (at, _), to in TABLE.items() if at in reached} | reached) != reached:
        reached = more
    assert reached == set(ModelState)
    assert {at for at, _ in TABLE} == set(ModelState)


def test_backoff_doubles_from_one_second_to_five_minutes_and_ends_with_a_success() -> None:
    backoff, delays = Backoff(), []
    assert backoff.delay_seconds == 0
    for _ in range(40):
        backoff = backoff.failed()
        delays.append(backoff.delay_seconds)
    assert delays[:9] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert set(delays[9:]) == {300}
    assert backoff.completed().failed().delay_seconds == 1
    assert Backoff().completed() == Backoff()


def test_documentation_contains_the_current_table() -> None:
    """`make reference` writes it."""
    text = DOCUMENT.read_text(encoding="utf-8")
    assert (text.count(BEGIN), text.count(END)) == (1, 1)
    assert text == rewritten(text)


def test_retry_after_is_the_sum_of_its_parts_and_at_least_a_second() -> None:
    assert retry_after_seconds(0, 0) == 1
    assert retry_after_seconds(3, 4.2) == 8
    assert retry_after_seconds(3, 4.2, 10, Pace(0.5)) == 13
    assert retry_after_seconds(3, 4.2, 10, Pace()) == 8
    assert retry_after_seconds(-5, -1, 2, Pace(1.0)) == 2


def test_rest_of_a_load_follows_from_its_progress() -> None:
    assert load_seconds_left(0.5, 10, 3) == 10
    assert load_seconds_left(0.01, 1, 3) == 2
    assert load_seconds_left(0.01, 9, 3) == 6, "a late load is expected to be later"


def test_first_load_is_estimated_from_the_rate_of_others() -> None:
    assert expected_load_seconds(10 * 2**30, None) == 1
    assert expected_load_seconds(10 * 2**30, 2 * 2**30) == 5
    assert expected_load_seconds(0, 1.0) == 0.1


def test_pace_follows_recent_answers() -> None:
    pace = Pace().answered(1.0)
    assert pace.seconds == 1
    for _ in range(30):
        pace = pace.answered(3.0)
    assert pace.seconds == pytest.approx(3, abs=0.01)
    assert Pace().answered(-1).seconds == 0


def test_queue_time_counts_requests_without_a_place() -> None:
    assert queue_seconds(0, 4, Pace()) == 0
    assert queue_seconds(3, 4, Pace()) == 0
    assert queue_seconds(4, 4, Pace()) is None, "no answer has been timed"
    assert queue_seconds(4, 4, Pace(2.0)) == 2
    assert queue_seconds(9, 4, Pace(2.0)) == 12


def test_commands_overrule_other_reasons_and_unloading_overrules_offloading() -> None:
    by_hand = Departure(Reason.BY_HAND)
    kept_by_hand = Departure(Reason.BY_HAND, Action.OFFLOAD)
    wanted = Departure(Reason.MEMORY_WANTED, Action.OFFLOAD)
    assert by_hand.overrules(wanted)
    assert kept_by_hand.overrules(wanted)
    assert by_hand.overrules(kept_by_hand)
    assert not kept_by_hand.overrules(by_hand)
    assert not wanted.overrules(by_hand)
    assert not Departure(Reason.PRESSURE).overrules(wanted)


def test_move_overrules_only_reasons_that_may_disappear() -> None:
    """It may end itself before the model has left."""
    moved = Departure(Reason.MOVED)
    assert moved.overrules(Departure(Reason.MEMORY_WANTED))
    assert not moved.overrules(Departure(Reason.CHANGED))
    assert not Departure(Reason.MEMORY_WANTED).overrules(moved)
    assert Departure(Reason.LOWERED, Action.OFFLOAD).overrules(moved)
