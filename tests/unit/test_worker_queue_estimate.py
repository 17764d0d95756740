"""Errors of a full queue: the priorities for which it is full, and `retry_after`."""

from __future__ import annotations

import pytest

from inference.protocol import FULL_FOR, RETRY_AFTER, Priority
from inference.worker.engine.queue_estimate import QueueEstimate
from inference.worker.engine.scheduler import Scheduler
from inference.worker.steps import Job, Limits

LIMITS = Limits(slots=4, context=64, batch=16, queue=8)


def _details(estimate: QueueEstimate, requested: int, room: int) -> dict[str, object]:
    return dict(estimate.queue_full(requested, room).body()["error"].get("headgate", {}))


def test_retry_after_is_none_before_a_sequence_ends() -> None:
    assert _details(QueueEstimate(LIMITS), 1, 0) == {FULL_FOR: [*Priority]}


@pytest.mark.parametrize(
    ("requested", "room", "expected"),
    [
        (1, 0, {RETRY_AFTER: 1.0, FULL_FOR: [*Priority]}),
        (3, 0, {RETRY_AFTER: 2.0, FULL_FOR: [*Priority]}),
        (8, 4, {RETRY_AFTER: 2.0}),
        (13, 12, {}),
    ],
    ids=["one too many", "three too many", "more at once than free", "more at once than ever"],
)
def test_queue_is_full_for_all_priorities_only_without_room(
    requested: int, room: int, expected: dict[str, object]
) -> None:
    estimate = QueueEstimate(LIMITS)
    estimate.observe(2.0)
    assert _details(estimate, requested, room) == expected


@pytest.mark.parametrize("steps", [0, 1], ids=["before the first step", "with all slots taken"])
@pytest.mark.parametrize("taken", range(13))
def test_queue_with_room_for_one_is_not_full_for_all_priorities(steps: int, taken: int) -> None:
    """Free slots take waiting jobs in the next step, so these jobs do not fill the queue."""
    scheduler = Scheduler(LIMITS)
    assert scheduler.submit([Job(number, (1, 2)) for number in range(taken)])
    for _ in range(steps if taken else 0):
        scheduler.plan(0.0, 16)
    assert not scheduler.submit([Job(100 + number, (1, 2)) for number in range(scheduler.room + 1)])
    expected = _details(QueueEstimate(LIMITS), min(12, scheduler.room + 1), scheduler.room)
    assert (FULL_FOR in expected) is not scheduler.submit([Job(200, (1, 2))])
