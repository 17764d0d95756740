"""Who is told that the queue is full, for whom it is, and when to come back."""

from __future__ import annotations

import pytest

from inference.protocol import FULL_FOR, RETRY_AFTER, Priority
from inference.worker.engine.queue_estimate import QueueEstimate
from inference.worker.engine.scheduler import Scheduler
from inference.worker.steps import Job, Limits

LIMITS = Limits(slots=4, context=64, batch=16, queue=8)


def _told(turnover: QueueEstimate, asked: int, room: int) -> dict[str, object]:
    return dict(turnover.queue_full(asked, room).body()["error"].get("headgate", {}))


def test_before_anything_is_known_nobody_is_told_when() -> None:
    assert _told(QueueEstimate(LIMITS), 1, 0) == {FULL_FOR: [*Priority]}


@pytest.mark.parametrize(
    ("asked", "room", "told"),
    [
        (1, 0, {RETRY_AFTER: 1.0, FULL_FOR: [*Priority]}),
        (3, 0, {RETRY_AFTER: 2.0, FULL_FOR: [*Priority]}),
        (8, 4, {RETRY_AFTER: 2.0}),
        (13, 12, {}),
    ],
    ids=["one too many", "three too many", "only so many at once", "never so many"],
)
def test_it_is_full_for_all_only_where_one_more_would_be_too_many(
    asked: int, room: int, told: dict[str, object]
) -> None:
    turnover = QueueEstimate(LIMITS)
    turnover.observe(2.0)
    assert _told(turnover, asked, room) == told


@pytest.mark.parametrize("steps", [0, 1], ids=["before the first step", "with all slots taken"])
@pytest.mark.parametrize("taken", range(13))
def test_a_queue_that_takes_one_more_is_not_full_for_everybody(steps: int, taken: int) -> None:
    """Slots that are free take some of those who wait in the next step; they are no more in the way than those."""
    scheduler = Scheduler(LIMITS)
    assert scheduler.submit([Job(number, (1, 2)) for number in range(taken)])
    for _ in range(steps if taken else 0):
        scheduler.plan(0.0, 16)
    assert not scheduler.submit([Job(100 + number, (1, 2)) for number in range(scheduler.room + 1)])
    told = _told(QueueEstimate(LIMITS), min(12, scheduler.room + 1), scheduler.room)
    assert (FULL_FOR in told) is not scheduler.submit([Job(200, (1, 2))])
