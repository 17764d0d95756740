"""Who is told that the queue is full, for whom it is, and when to come back."""

from __future__ import annotations

import pytest

from inference.protocol import FULL_FOR, RETRY_AFTER, Priority
from inference.worker.core.steps import Limits
from inference.worker.turnover import Turnover

LIMITS = Limits(slots=4, context=64, batch=16, queue=8)


def _told(turnover: Turnover, asked: int, waiting: int) -> dict[str, object]:
    return dict(turnover.queue_full(asked, waiting).body()["error"].get("headgate", {}))


def test_before_anything_is_known_nobody_is_told_when() -> None:
    assert _told(Turnover(LIMITS), 1, 8) == {FULL_FOR: [*Priority]}


@pytest.mark.parametrize(
    ("asked", "waiting", "told"),
    [
        (1, 8, {RETRY_AFTER: 1.0, FULL_FOR: [*Priority]}),
        (2, 9, {RETRY_AFTER: 2.0, FULL_FOR: [*Priority]}),
        (8, 4, {RETRY_AFTER: 2.0}),
        (13, 0, {}),
    ],
    ids=["one too many", "more wait than the queue holds", "only so many at once", "never so many"],
)
def test_it_is_full_for_all_only_where_one_more_would_be_too_many(
    asked: int, waiting: int, told: dict[str, object]
) -> None:
    turnover = Turnover(LIMITS)
    turnover.took(2.0)
    assert _told(turnover, asked, waiting) == told
