"""Whoever stood still itself blames no worker: not for its silence, nor for a long load, nor for a long step."""

from __future__ import annotations

import pytest

from inference.workers.hang_detection import Patience, Pause, without_pauses
from inference.workers.hang_watch import TICK_SECONDS, Watch
from inference.workers.worker_link import Beat

PATIENCE = Patience(start_seconds=5, load_seconds=50, silence_seconds=3, step_seconds=10, step_seconds_per_token=1)


def _beat(step_seconds: float | None) -> Beat:
    return Beat(step_seconds, 2, 1, 0, 10, 10)


def _ticks(watch: Watch, until: float, since: float = 0.0) -> None:
    steps = int((until - since) / TICK_SECONDS)
    for number in range(1, steps + 1):
        watch.tick(since + number * TICK_SECONDS)


@pytest.mark.parametrize("slept", [0.0, 3600.0])
def test_time_in_which_we_slept_does_not_count_before_a_worker_is_ready(slept: float) -> None:
    watch = Watch(PATIENCE, 0.0)
    _ticks(watch, 4.0)
    at = 4.5 + slept
    watch.tick(at)
    assert watch.complaint(at, None, greeted=False) is None
    assert watch.complaint(at + 0.6, None, greeted=False) == "no sign of life within 5 s of its start"
    watch.heard(at)
    watch.asked(at)
    watch.tick(at + slept + 0.5)
    watch.heard(at + slept + 0.5)
    assert watch.complaint(at + slept + 0.5, None, greeted=True) is None


def test_a_worker_is_heard_anew_after_a_pause_and_is_blamed_for_what_comes_then() -> None:
    watch = Watch(PATIENCE, 0.0)
    watch.done()
    assert watch.is_ready
    watch.tick(100.0)
    assert watch.complaint(100.0, None, greeted=True) is None
    _ticks(watch, 103.0, since=100.0)
    assert watch.complaint(103.0, None, greeted=True) is None
    watch.tick(103.5)
    assert watch.complaint(103.5, None, greeted=True) == "silent for 4 s"


def test_a_step_that_was_suspended_with_the_machine_is_not_a_long_one() -> None:
    """Its worker counts the time that it slept itself, and tells it when both are awake."""
    watch = Watch(PATIENCE, 0.0)
    watch.done()
    _ticks(watch, 2.0)
    watch.tick(1000.0)
    watch.heard(1000.1)
    assert watch.complaint(1000.1, _beat(999.0), greeted=True) is None
    _ticks(watch, 1012.0, since=1000.0)
    watch.heard(1012.0)
    assert watch.complaint(1012.0, _beat(1011.0), greeted=True) == "a step of 2 tokens takes longer than 12 s"
    assert watch.complaint(1012.0, _beat(None), greeted=True) is None


def test_a_tick_that_is_a_little_late_is_no_pause() -> None:
    watch = Watch(PATIENCE, 0.0)
    watch.done()
    now = 0.0
    for _ in range(6):
        now += 2 * TICK_SECONDS
        watch.tick(now)
    assert watch.complaint(now + 0.1, None, greeted=True) == "silent for 6 s"


@pytest.mark.parametrize(
    ("step", "pauses", "seconds"),
    [
        (10.0, [], 10.0),
        (10.0, [Pause(85.0, 5.0)], 10.0),
        (10.0, [Pause(95.0, 3.0)], 7.0),
        (10.0, [Pause(95.0, 30.0)], 5.0),
        (10.0, [Pause(93.0, 2.0), Pause(97.0, 2.0)], 6.0),
        (1.0, [Pause(100.0, 50.0)], 0.0),
    ],
)
def test_only_what_lies_within_the_step_is_left_out(step: float, pauses: list[Pause], seconds: float) -> None:
    assert without_pauses(step, 100.0, pauses) == pytest.approx(seconds)
