"""Which attempts that still wait speak against a tier: at each stage those that nobody has overtaken since."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.silence import KNOWN, PATIENCE, REMEMBERED, SILENT_SECONDS, Silence

LOST = 1e9
ENOUGH = 5


def _known(first_word_seconds: float = 0.5) -> Silence:
    """A tier that has answered so many that the time to its first words is known."""
    silence = Silence()
    for number in range(-REMEMBERED, 0):
        silence.asked(number, -100.0, LOST)
        silence.opened(number, -99.0)
        silence.begun(number, -99.0 + first_word_seconds)
        silence.ended(number, -50.0, whole=True)
    return silence


def _ask(silence: Silence, at: float, count: int = ENOUGH, first: int = 0) -> None:
    for number in range(first, first + count):
        silence.asked(number, at, LOST)


def _open(silence: Silence, at: float, count: int = ENOUGH) -> None:
    for number in range(count):
        silence.opened(number, at)


def _begin(silence: Silence, at: float, count: int = ENOUGH) -> None:
    for number in range(count):
        silence.begun(number, at)


ADVANCES: dict[str, Callable[[Silence], None]] = {
    "asked": lambda silence: _ask(silence, 1.0),
    "opened": lambda silence: (_ask(silence, 0.0), _open(silence, 1.0))[0],
    "begun": lambda silence: (_ask(silence, 0.0), _open(silence, 0.0), _begin(silence, 1.0))[0],
}


@pytest.mark.parametrize("stage", ADVANCES)
def test_who_waits_long_at_a_stage_speaks_against_the_tier(stage: str) -> None:
    silence = _known()
    ADVANCES[stage](silence)
    assert silence.speaking(0.9 + SILENT_SECONDS, ENOUGH) == 0
    assert silence.speaking(1.0 + SILENT_SECONDS, ENOUGH) == ENOUGH
    assert silence.speaking(1.0 + SILENT_SECONDS, 2) == 2, "nobody counts further than that"
    assert silence.speaking(1.0 + SILENT_SECONDS, ENOUGH + 1) == 0, "so many do not even wait"


def test_whoever_passes_a_stage_speaks_for_those_who_came_there_before() -> None:
    now = 20.0
    silence = _known()
    _ask(silence, 0.0, ENOUGH + 1)
    silence.opened(5, 1.0)
    assert silence.speaking(now, ENOUGH) == 1, "it answers; only whoever it answered waits since then"
    _open(silence, 2.0)
    assert silence.speaking(now, ENOUGH) == ENOUGH, "with a head"
    silence.begun(5, 3.0)
    assert silence.speaking(now, ENOUGH) == 1, "it has words"
    _begin(silence, 4.0)
    assert silence.speaking(now, ENOUGH) == ENOUGH, "some"
    silence.ended(5, 5.0, whole=True)
    assert silence.speaking(now, ENOUGH) == 0, "and it comes to an end"


def test_who_left_or_is_lost_says_nothing() -> None:
    silence = _known()
    _ask(silence, 0.0, ENOUGH + 1)
    silence.ended(0, 1.0, whole=False)
    assert silence.speaking(10.0, ENOUGH) == ENOUGH, "who leaves has not been answered"
    silence.ended(1, 1.0, whole=False)
    assert silence.speaking(10.0, ENOUGH) == 0
    for number in range(ENOUGH):
        silence.asked(number, 2.0, 15.0)
    assert silence.speaking(14.9, ENOUGH) == ENOUGH
    assert silence.speaking(15.0, ENOUGH) == 1
    silence.clear()
    assert silence.speaking(10.0, 1) == 0


def test_numbers_that_are_not_known_change_nothing() -> None:
    silence = _known()
    _ask(silence, 0.0)
    for number in (98, 99):
        silence.opened(number, 1.0)
        silence.begun(number, 1.0)
        silence.ended(number, 1.0, whole=True)
    assert silence.speaking(10.0, ENOUGH) == ENOUGH


@pytest.mark.parametrize("first_words", range(KNOWN + 1))
def test_behind_the_first_byte_nothing_is_judged_before_the_tier_is_known(first_words: int) -> None:
    silence = Silence()
    _ask(silence, 0.0, first_words, first=100)
    for number in range(100, 100 + first_words):
        silence.opened(number, 0.0)
        silence.begun(number, 0.5)
        silence.ended(number, 0.6, whole=True)
    _ask(silence, 1.0)
    assert silence.speaking(1.0 + SILENT_SECONDS, ENOUGH) == ENOUGH, "where there is no byte there is no thinking"
    _open(silence, 2.0)
    assert (silence.speaking(1e6, ENOUGH) == ENOUGH) is (first_words == KNOWN)


@pytest.mark.parametrize("stage", ["opened", "begun"])
def test_a_tier_that_thinks_for_long_is_given_longer(stage: str) -> None:
    silence = _known(first_word_seconds=12.0)
    ADVANCES[stage](silence)
    allowed = PATIENCE * 12.0
    assert silence.speaking(0.9 + allowed, ENOUGH) == 0
    # those of the five who have begun took a second themselves, and only the last sixteen are remembered
    assert silence.speaking(1.0 + allowed, ENOUGH) == ENOUGH


def test_only_recent_first_words_tell_how_long_it_thinks() -> None:
    silence = _known(first_word_seconds=12.0)
    for number in range(100, 100 + REMEMBERED):
        silence.asked(number, 0.0, LOST)
        silence.opened(number, 0.0)
        silence.begun(number, 0.5)
        silence.ended(number, 0.6, whole=True)
    ADVANCES["opened"](silence)
    assert silence.speaking(1.0 + SILENT_SECONDS, ENOUGH) == ENOUGH


def test_an_answer_that_goes_on_or_waits_for_its_reader_is_not_silent() -> None:
    silence = _known()
    silent = dict.fromkeys(range(ENOUGH), 20.0)
    for number in silent:
        silence.asked(number, 0.0, LOST)
        silence.opened(number, 1.0, lambda number=number: silent[number])  # type: ignore[misc]
    assert silence.speaking(30.0, ENOUGH) == ENOUGH
    silent[3] = 0.0
    assert silence.speaking(30.0, ENOUGH) == ENOUGH - 1


def test_words_without_a_head_are_taken_as_they_come() -> None:
    """A provider that hands over its answer whole."""
    silence = Silence()
    for number in range(KNOWN):
        silence.asked(number, 0.0, LOST)
        silence.begun(number, 30.0)
        silence.ended(number, 30.0, whole=True)
    _ask(silence, 31.0)
    _open(silence, 31.0)
    assert silence.speaking(1e6, ENOUGH) == 0, "nothing was learned about heads"


@given(
    gaps=st.lists(st.floats(0.0, SILENT_SECONDS - 0.1), min_size=1, max_size=40),
    stages=st.lists(st.integers(0, 2), min_size=40, max_size=40),
)
def test_a_tier_that_leads_somebody_through_in_time_is_never_silent(gaps: list[float], stages: list[int]) -> None:
    """However many wait: every so often one answer is whole, so nobody is overdue who came before it."""
    silence, now = _known(), 0.0
    for number, gap in enumerate(gaps):
        silence.asked(number, now, LOST)
        for reached, go in ((1, silence.opened), (2, silence.begun)):
            if stages[number] >= reached:
                go(number, now)
        now += gap
        silence.asked(1000 + number, now, LOST)
        assert silence.speaking(now, 1) == 0
        silence.ended(1000 + number, now, whole=True)
        assert silence.speaking(now + SILENT_SECONDS + 1, 1) == 0
