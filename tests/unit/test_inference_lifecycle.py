"""Which state follows which event; nothing else does. How long failures rest."""

from __future__ import annotations

import itertools

import pytest

from inference.authority.lifecycle.transitions import TABLE, Backoff, IllegalTransition, ModelEvent, advance
from inference.protocol import ModelState
from inference.tools.state_diagrams import BEGIN, DOCUMENT, END, rewritten


@pytest.mark.parametrize(("state", "event"), list(itertools.product(ModelState, ModelEvent)))
def test_only_the_table_moves_a_model(state: ModelState, event: ModelEvent) -> None:
    if (state, event) in TABLE:
        assert advance(state, event) is TABLE[state, event]
    else:
        with pytest.raises(IllegalTransition, match=f"a {state} model cannot {event}"):
            advance(state, event)


def test_a_whole_life() -> None:
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


def test_every_state_can_be_reached_and_left() -> None:
    """No state is a trap, and none is decoration."""
    reached = {ModelState.COLD}
    while True:
        more = {to for (at, _), to in TABLE.items() if at in reached} | reached
        if more == reached:
            break
        reached = more
    assert reached == set(ModelState)
    assert {at for at, _ in TABLE} == set(ModelState)


def test_backoff_doubles_from_one_second_to_five_minutes_and_is_forgotten_by_a_success() -> None:
    backoff, delays = Backoff(), []
    assert backoff.delay_seconds == 0
    for _ in range(40):
        backoff = backoff.failed()
        delays.append(backoff.delay_seconds)
    assert delays[:9] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert set(delays[9:]) == {300}
    assert backoff.completed().failed().delay_seconds == 1
    assert Backoff().completed() == Backoff()


def test_the_documentation_shows_the_table_as_it_is() -> None:
    """`make reference` writes it."""
    text = DOCUMENT.read_text(encoding="utf-8")
    assert (text.count(BEGIN), text.count(END)) == (1, 1)
    assert text == rewritten(text)
