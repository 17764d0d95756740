"""Attempts are silent if they wait long at a stage and no later attempt has passed this stage."""

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


def _answer(detector: SilenceDetector, number: int, at: float, first: float = 0.5, later: float = 0.5) -> None:
    """A whole answer, with its longest silences before and after the first token."""
    activity = FakeActivity(longest_silence=first)
    detector.started(number, at, LOST)
    detector.first_byte(number, at, activity)
    detector.first_token(number, at)
    activity.longest_silence = later
    detector.ended(number, answered=True)


def _sampled(first: float = 0.5, later: float = 0.5, *, is_model: bool = True) -> SilenceDetector:
    """A detector with the largest number of samples."""
    detector = SilenceDetector(is_model=is_model)
    for number in range(-MAX_SAMPLES, 0):
        _answer(detector, number, -100.0, first, later)
    return detector


def _start(detector: SilenceDetector, at: float, count: int = ENOUGH, seconds: float = LONG) -> list[FakeActivity]:
    for number in range(count):
        detector.started(number, at, LOST)
    return [FakeActivity(seconds) for _ in range(count)]


def _get_byte(detector: SilenceDetector, at: float, count: int = ENOUGH, seconds: float = LONG) -> list[FakeActivity]:
    """`count` attempts that get their first byte at `at`."""
    activities = _start(detector, at, count, seconds)
    for number, activity in enumerate(activities):
        detector.first_byte(number, at, activity)
    return activities


def _get_token(detector: SilenceDetector, at: float, count: int = ENOUGH, seconds: float = LONG) -> list[FakeActivity]:
    """`count` attempts that get their first token at `at`."""
    activities = _get_byte(detector, at, count, seconds)
    for number in range(count):
        detector.first_token(number, at)
    return activities


STAGES: dict[str, Callable[..., list[FakeActivity]]] = {
    "started": _start,
    "first byte": _get_byte,
    "first token": _get_token,
}


@pytest.mark.parametrize("stage", STAGES)
def test_attempts_that_wait_long_at_a_stage_are_silent(stage: str) -> None:
    detector = _sampled()
    STAGES[stage](detector, 1.0)
    assert detector.silent_attempts(0.9 + SILENT_SECONDS, ENOUGH) == 0
    assert detector.silent_attempts(1.0 + SILENT_SECONDS, ENOUGH) == ENOUGH
    assert detector.silent_attempts(1.0 + SILENT_SECONDS, 2) == 2, "counting stops at the given number"
    for number in range(ENOUGH):
        assert detector.silent_attempts(1.0 + SILENT_SECONDS, ENOUGH) == ENOUGH - number
        detector.ended(number, answered=False)


@pytest.mark.parametrize("stage", STAGES)
def test_cleared_attempts_are_not_silent(stage: str) -> None:
    detector = _sampled()
    STAGES[stage](detector, 1.0)
    detector.clear()
    detector.first_byte(0, 2.0, FakeActivity(LONG))
    detector.first_token(0, 2.0)
    assert detector.silent_attempts(100.0, 1) == 0
    detector.ended(0, answered=True)
    _start(detector, 3.0)
    detector.ended(99, answered=True)
    assert detector.silent_attempts(100.0, ENOUGH) == ENOUGH, "unknown numbers change nothing"


def test_after_a_first_byte_earlier_attempts_that_wait_for_one_are_not_silent() -> None:
    detector = _sampled()
    _start(detector, 1.0, ENOUGH + 1)
    detector.first_byte(ENOUGH, 2.0, FakeActivity())
    assert detector.silent_attempts(20.0, 1) == 0
    _start(detector, 3.0)
    assert detector.silent_attempts(20.0, ENOUGH) == ENOUGH, "later attempts still count"
    detector.started(50, 4.0, LOST)
    detector.ended(50, answered=True)
    assert detector.silent_attempts(20.0, 1) == 0, "the same after a unary answer"


def test_after_a_first_token_earlier_attempts_that_wait_for_one_are_not_silent() -> None:
    detector = _sampled()
    _get_byte(detector, 1.0, ENOUGH + 1)
    assert detector.silent_attempts(20.0, ENOUGH) == ENOUGH, "first bytes of other attempts do not clear them"
    detector.first_token(ENOUGH, 2.0)
    assert detector.silent_attempts(20.0, ENOUGH) == 1, "only the attempt that got its token waits, at the next stage"


def test_whole_answer_clears_attempts_after_first_token() -> None:
    detector = _sampled()
    _get_token(detector, 1.0, ENOUGH + 1)
    detector.ended(ENOUGH, answered=False)
    assert detector.silent_attempts(20.0, ENOUGH) == ENOUGH, "an interrupted answer does not clear them"
    detector.ended(0, answered=True)
    assert detector.silent_attempts(20.0, 1) == 0


def test_expired_attempt_is_not_silent() -> None:
    detector = _sampled()
    for number in range(ENOUGH):
        detector.started(number, 2.0, 15.0)
    assert detector.silent_attempts(14.9, ENOUGH) == ENOUGH
    assert detector.silent_attempts(15.0, ENOUGH) == 0


@pytest.mark.parametrize("answers", range(MIN_SAMPLES + 1))
def test_silence_after_first_byte_is_judged_only_with_enough_samples(answers: int) -> None:
    detector = SilenceDetector(is_model=True)
    for number in range(100, 100 + answers):
        _answer(detector, number, 0.0)
    _start(detector, 1.0)
    silent = detector.silent_attempts(1.0 + SILENT_SECONDS, ENOUGH)
    assert silent == ENOUGH, "before the first byte a model is not thinking"
    _get_byte(detector, 2.0)
    assert (detector.silent_attempts(LONG, ENOUGH) == ENOUGH) is (answers == MIN_SAMPLES)


@pytest.mark.parametrize("stage", ["first byte", "first token"])
def test_provider_is_judged_only_before_first_byte(stage: str) -> None:
    """Otherwise a slow model would be avoided because of a fast one."""
    detector = _sampled(is_model=False)
    STAGES[stage](detector, 1.0)
    assert detector.silent_attempts(LONG, 1) == 0
    _start(detector, 2.0)
    assert detector.silent_attempts(2.0 + SILENT_SECONDS, ENOUGH) == ENOUGH


@pytest.mark.parametrize(("stage", "first", "later"), [("first byte", 12.0, 0.5), ("first token", 0.5, 12.0)])
def test_allowed_silence_follows_earlier_attempts_per_stage(stage: str, first: float, later: float) -> None:
    detector = _sampled(first, later)
    for name in ("first byte", "first token"):
        detector.clear()
        activities = STAGES[name](detector, 1.0)
        allowed = SILENCE_FACTOR * 12.0 if name == stage else SILENT_SECONDS
        # first tokens add samples without silence, but older samples remain and the longest one counts
        assert detector.silent_attempts(0.9 + allowed, ENOUGH) == 0
        assert detector.silent_attempts(1.0 + allowed, ENOUGH) == ENOUGH
        activities[0].seconds = allowed - 0.1
        assert detector.silent_attempts(LONG, ENOUGH) == ENOUGH - 1, "it had a sign of life"


def test_allowed_silence_uses_recent_samples() -> None:
    detector = _sampled(first=12.0, later=12.0)
    for number in range(100, 100 + MAX_SAMPLES):
        _answer(detector, number, 0.0)
    for stage in ("first byte", "first token"):
        detector.clear()
        STAGES[stage](detector, 1.0)
        assert detector.silent_attempts(1.0 + SILENT_SECONDS, ENOUGH) == ENOUGH


@given(
    gaps=st.lists(st.floats(0.0, SILENT_SECONDS - 0.1), min_size=1, max_size=40),
    stages=st.lists(st.integers(0, 2), min_size=40, max_size=40),
)
def test_tier_with_regular_answers_is_never_silent(gaps: list[float], stages: list[int]) -> None:
    """Complete answers arrive often enough, however many other attempts wait."""
    detector, now = _sampled(), 0.0
    for number, gap in enumerate(gaps):
        detector.started(number, now, LOST)
        if stages[number] >= 1:
            detector.first_byte(number, now, FakeActivity(LONG))
        if stages[number] >= 2:
            detector.first_token(number, now)
        now += gap
        assert detector.silent_attempts(now, 1) == 0
        _answer(detector, 1000 + number, now)
        assert detector.silent_attempts(now + SILENT_SECONDS + 1, 1) == 0
