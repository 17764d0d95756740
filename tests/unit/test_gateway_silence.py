"""Which attempts that still wait speak against a tier: at each stage those that nobody has overtaken since."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.breaker.silence import MAX_SAMPLES, MIN_SAMPLES, SILENCE_FACTOR, SILENT_SECONDS, SilenceDetector
from tests.rigs.breaker_rig import FakeActivity

LOST = 1e9
ENOUGH = 5
LONG = 1e6


def _answer(silence: SilenceDetector, number: int, at: float, first: float = 0.5, later: float = 0.5) -> None:
    """A whole answer, with the longest silences before and behind its first word."""
    heard = FakeActivity(longest_silence=first)
    silence.started(number, at, LOST)
    silence.first_byte(number, at, heard)
    silence.first_token(number, at)
    heard.longest_silence = later
    silence.ended(number, answered=True)


def _known(first: float = 0.5, later: float = 0.5, *, is_model: bool = True) -> SilenceDetector:
    """A tier that has answered so many that its silences are known."""
    silence = SilenceDetector(is_model=is_model)
    for number in range(-MAX_SAMPLES, 0):
        _answer(silence, number, -100.0, first, later)
    return silence


def _ask(silence: SilenceDetector, at: float, count: int = ENOUGH, seconds: float = LONG) -> list[FakeActivity]:
    for number in range(count):
        silence.started(number, at, LOST)
    return [FakeActivity(seconds) for _ in range(count)]


def _open(silence: SilenceDetector, at: float, count: int = ENOUGH, seconds: float = LONG) -> list[FakeActivity]:
    """As many that are asked and opened then."""
    all_heard = _ask(silence, at, count, seconds)
    for number, heard in enumerate(all_heard):
        silence.first_byte(number, at, heard)
    return all_heard


def _begin(silence: SilenceDetector, at: float, count: int = ENOUGH, seconds: float = LONG) -> list[FakeActivity]:
    """As many that have begun then."""
    all_heard = _open(silence, at, count, seconds)
    for number in range(count):
        silence.first_token(number, at)
    return all_heard


STAGES: dict[str, Callable[..., list[FakeActivity]]] = {"asked": _ask, "opened": _open, "begun": _begin}


@pytest.mark.parametrize("stage", STAGES)
def test_attempts_that_wait_long_at_a_stage_are_silent(stage: str) -> None:
    silence = _known()
    STAGES[stage](silence, 1.0)
    assert silence.silent_attempts(0.9 + SILENT_SECONDS, ENOUGH) == 0
    assert silence.silent_attempts(1.0 + SILENT_SECONDS, ENOUGH) == ENOUGH
    assert silence.silent_attempts(1.0 + SILENT_SECONDS, 2) == 2, "nobody counts further than that"
    for number in range(ENOUGH):
        assert silence.silent_attempts(1.0 + SILENT_SECONDS, ENOUGH) == ENOUGH - number
        silence.ended(number, answered=False)


@pytest.mark.parametrize("stage", STAGES)
def test_cleared_attempts_are_not_silent(stage: str) -> None:
    silence = _known()
    STAGES[stage](silence, 1.0)
    silence.clear()
    silence.first_byte(0, 2.0, FakeActivity(LONG))
    silence.first_token(0, 2.0)
    assert silence.silent_attempts(100.0, 1) == 0
    silence.ended(0, answered=True)
    _ask(silence, 3.0)
    silence.ended(99, answered=True)
    assert silence.silent_attempts(100.0, ENOUGH) == ENOUGH, "numbers that are not known change nothing"


def test_first_byte_clears_attempts_that_wait_for_one() -> None:
    silence = _known()
    _ask(silence, 1.0, ENOUGH + 1)
    silence.first_byte(ENOUGH, 2.0, FakeActivity())
    assert silence.silent_attempts(20.0, 1) == 0
    _ask(silence, 3.0)
    assert silence.silent_attempts(20.0, ENOUGH) == ENOUGH, "not for who comes later"
    silence.started(50, 4.0, LOST)
    silence.ended(50, answered=True)
    assert silence.silent_attempts(20.0, 1) == 0, "an answer without a stream has one too"


def test_first_token_clears_attempts_that_wait_for_one() -> None:
    silence = _known()
    _open(silence, 1.0, ENOUGH + 1)
    assert silence.silent_attempts(20.0, ENOUGH) == ENOUGH, "among themselves first bytes prove nothing"
    silence.first_token(ENOUGH, 2.0)
    assert silence.silent_attempts(20.0, ENOUGH) == 1, "but who has it"


def test_whole_answer_clears_attempts_after_first_token() -> None:
    silence = _known()
    _begin(silence, 1.0, ENOUGH + 1)
    silence.ended(ENOUGH, answered=False)
    assert silence.silent_attempts(20.0, ENOUGH) == ENOUGH, "one that broke off does not"
    silence.ended(0, answered=True)
    assert silence.silent_attempts(20.0, 1) == 0


def test_expired_attempt_is_not_silent() -> None:
    silence = _known()
    for number in range(ENOUGH):
        silence.started(number, 2.0, 15.0)
    assert silence.silent_attempts(14.9, ENOUGH) == ENOUGH
    assert silence.silent_attempts(15.0, ENOUGH) == 0


@pytest.mark.parametrize("answers", range(MIN_SAMPLES + 1))
def test_silence_after_first_byte_needs_samples(answers: int) -> None:
    silence = SilenceDetector(is_model=True)
    for number in range(100, 100 + answers):
        _answer(silence, number, 0.0)
    _ask(silence, 1.0)
    assert silence.silent_attempts(1.0 + SILENT_SECONDS, ENOUGH) == ENOUGH, (
        "where there is no byte there is no thinking"
    )
    _open(silence, 2.0)
    assert (silence.silent_attempts(LONG, ENOUGH) == ENOUGH) is (answers == MIN_SAMPLES)


@pytest.mark.parametrize("stage", ["opened", "begun"])
def test_provider_is_judged_only_before_first_byte(stage: str) -> None:
    """A model that thinks would be left because of another one that does not."""
    silence = _known(is_model=False)
    STAGES[stage](silence, 1.0)
    assert silence.silent_attempts(LONG, 1) == 0
    _ask(silence, 2.0)
    assert silence.silent_attempts(2.0 + SILENT_SECONDS, ENOUGH) == ENOUGH


@pytest.mark.parametrize(("stage", "first", "later"), [("opened", 12.0, 0.5), ("begun", 0.5, 12.0)])
def test_allowed_silence_follows_earlier_attempts_per_stage(stage: str, first: float, later: float) -> None:
    silence = _known(first, later)
    for name in ("opened", "begun"):
        silence.clear()
        all_heard = STAGES[name](silence, 1.0)
        allowed = SILENCE_FACTOR * 12.0 if name == stage else SILENT_SECONDS
        # those who have begun were silent for nothing before that, and only the last sixteen are remembered
        assert silence.silent_attempts(0.9 + allowed, ENOUGH) == 0
        assert silence.silent_attempts(1.0 + allowed, ENOUGH) == ENOUGH
        all_heard[0].seconds = allowed - 0.1
        assert silence.silent_attempts(LONG, ENOUGH) == ENOUGH - 1, "it goes on, or waits for its reader"


def test_allowed_silence_uses_recent_samples() -> None:
    silence = _known(first=12.0, later=12.0)
    for number in range(100, 100 + MAX_SAMPLES):
        _answer(silence, number, 0.0)
    for stage in ("opened", "begun"):
        silence.clear()
        STAGES[stage](silence, 1.0)
        assert silence.silent_attempts(1.0 + SILENT_SECONDS, ENOUGH) == ENOUGH


@given(
    gaps=st.lists(st.floats(0.0, SILENT_SECONDS - 0.1), min_size=1, max_size=40),
    stages=st.lists(st.integers(0, 2), min_size=40, max_size=40),
)
def test_tier_with_regular_answers_is_never_silent(gaps: list[float], stages: list[int]) -> None:
    """However many wait: every so often one answer is whole, so nobody is overdue who came before it."""
    silence, now = _known(), 0.0
    for number, gap in enumerate(gaps):
        silence.started(number, now, LOST)
        if stages[number] >= 1:
            silence.first_byte(number, now, FakeActivity(LONG))
        if stages[number] >= 2:
            silence.first_token(number, now)
        now += gap
        assert silence.silent_attempts(now, 1) == 0
        _answer(silence, 1000 + number, now)
        assert silence.silent_attempts(now + SILENT_SECONDS + 1, 1) == 0
