"""Hang detection: timeouts of a worker, and pauses of the service that do not count."""

from __future__ import annotations

from typing import Any

import pytest

from inference.worker_link import Heartbeat
from inference.workers.hang_detection import TICK_SECONDS, HangTimeouts, HangWatch, Pause, without_pauses

TIMEOUTS = HangTimeouts(start_seconds=5, load_seconds=50, silence_seconds=3, step_seconds=10, step_seconds_per_token=1)


def _beat(step_seconds: float | None, *, step_tokens: int = 2, done: int = 10) -> Heartbeat:
    return Heartbeat(step_seconds, step_tokens, 1, 0, done, done)


def _stepping(step_seconds: float, done: int = 10) -> dict[str, Any]:
    return {"age": 999, "silent": 2, "beat": _beat(step_seconds, step_tokens=5, done=done)}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"age": 4, "silent": 4, "hello_received": False, "ready": False}, None),
        ({"age": 6, "silent": 4, "hello_received": False, "ready": False}, "no sign of life within 6 s of its start"),
        ({"age": 49, "silent": 2, "ready": False}, None),
        ({"age": 49, "silent": 4, "ready": False}, "silent for 4 s"),
        ({"age": 51, "silent": 2, "ready": False}, "not loaded within 51 s"),
        ({"age": 999, "silent": 2}, None),
        ({"age": 999, "silent": 4}, "silent for 4 s"),
        (_stepping(14.0), None),
        (_stepping(16.0), "a step of 5 tokens takes longer than 15 s"),
        (_stepping(59.0, done=0), None),
        (_stepping(61.0, done=0), "a step of 5 tokens takes longer than 60 s"),
    ],
)
def test_worker_hangs_when_a_timeout_has_passed(state: dict[str, Any], reason: str | None) -> None:
    watch = HangWatch(TIMEOUTS, 0.0)
    watch.note_message(state["age"] - state["silent"])
    if state.get("ready", True):
        watch.end_task()
    assert (
        watch.hang_reason(state["age"], state.get("beat"), hello_received=state.get("hello_received", True)) == reason
    )


def _ticks(watch: HangWatch, until: float, since: float = 0.0) -> None:
    steps = int((until - since) / TICK_SECONDS)
    for number in range(1, steps + 1):
        watch.tick(since + number * TICK_SECONDS)


@pytest.mark.parametrize("suspended", [0.0, 3600.0])
def test_suspended_time_does_not_count_before_a_worker_is_ready(suspended: float) -> None:
    watch = HangWatch(TIMEOUTS, 0.0)
    _ticks(watch, 4.0)
    at = 4.5 + suspended
    watch.tick(at)
    assert watch.hang_reason(at, None, hello_received=False) is None
    assert watch.hang_reason(at + 0.6, None, hello_received=False) == "no sign of life within 5 s of its start"
    watch.note_message(at)
    watch.begin_task(at)
    watch.tick(at + suspended + 0.5)
    watch.note_message(at + suspended + 0.5)
    assert watch.hang_reason(at + suspended + 0.5, None, hello_received=True) is None


def test_silence_counts_again_after_a_pause() -> None:
    watch = HangWatch(TIMEOUTS, 0.0)
    watch.end_task()
    assert not watch.has_task
    watch.tick(100.0)
    assert watch.hang_reason(100.0, None, hello_received=True) is None
    _ticks(watch, 103.0, since=100.0)
    assert watch.hang_reason(103.0, None, hello_received=True) is None
    watch.tick(103.5)
    assert watch.hang_reason(103.5, None, hello_received=True) == "silent for 4 s"


def test_suspended_time_does_not_count_as_part_of_a_step() -> None:
    """The worker reports a step time that includes the suspended time."""
    watch = HangWatch(TIMEOUTS, 0.0)
    watch.end_task()
    _ticks(watch, 2.0)
    watch.tick(1000.0)
    watch.note_message(1000.1)
    assert watch.hang_reason(1000.1, _beat(999.0), hello_received=True) is None
    _ticks(watch, 1012.0, since=1000.0)
    watch.note_message(1012.0)
    assert watch.hang_reason(1012.0, _beat(1011.0), hello_received=True) == "a step of 2 tokens takes longer than 12 s"
    assert watch.hang_reason(1012.0, _beat(None), hello_received=True) is None


def test_slightly_late_tick_is_no_pause() -> None:
    watch = HangWatch(TIMEOUTS, 0.0)
    watch.end_task()
    now = 0.0
    for _ in range(6):
        now += 2 * TICK_SECONDS
        watch.tick(now)
    assert watch.hang_reason(now + 0.1, None, hello_received=True) == "silent for 6 s"


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
def test_only_pauses_within_the_step_are_subtracted(step: float, pauses: list[Pause], seconds: float) -> None:
    assert without_pauses(step, 100.0, pauses) == pytest.approx(seconds)
