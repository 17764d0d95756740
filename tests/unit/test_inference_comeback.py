"""When somebody who was turned away may come back: room, load and queue in measured seconds."""

from __future__ import annotations

import pytest

from inference.authority.lifecycle.retry_after import (
    Pace,
    expected_load_seconds,
    load_seconds_left,
    queue_seconds,
    retry_after_seconds,
)


def test_all_three_parts_count_and_it_is_never_less_than_a_second() -> None:
    assert retry_after_seconds(0, 0) == 1
    assert retry_after_seconds(3, 4.2) == 8
    assert retry_after_seconds(3, 4.2, 10, Pace(0.5)) == 13
    assert retry_after_seconds(3, 4.2, 10, Pace()) == 8
    assert retry_after_seconds(-5, -1, 2, Pace(1.0)) == 2


def test_a_running_load_is_judged_by_its_own_progress_once_it_tells_any() -> None:
    assert load_seconds_left(0.5, 10, 3) == 10
    assert load_seconds_left(0.01, 1, 3) == 2
    assert load_seconds_left(0.01, 9, 3) == 6, "it is late, and so it is expected to be later"


def test_a_first_load_is_expected_at_the_rate_of_others() -> None:
    assert expected_load_seconds(10 * 2**30, None) == 1
    assert expected_load_seconds(10 * 2**30, 2 * 2**30) == 5
    assert expected_load_seconds(0, 1.0) == 0.1


def test_the_pace_follows_what_was_measured_last() -> None:
    pace = Pace().answered(1.0)
    assert pace.seconds == 1
    for _ in range(30):
        pace = pace.answered(3.0)
    assert pace.seconds == pytest.approx(3, abs=0.01)
    assert Pace().answered(-1).seconds == 0


def test_a_place_is_waited_for_only_behind_those_that_have_none() -> None:
    assert queue_seconds(0, 4, Pace()) == 0
    assert queue_seconds(3, 4, Pace()) == 0
    assert queue_seconds(4, 4, Pace()) is None, "no answer was ever timed"
    assert queue_seconds(4, 4, Pace(2.0)) == 2
    assert queue_seconds(9, 4, Pace(2.0)) == 12
