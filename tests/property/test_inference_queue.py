"""Waiting requests are served by priority, then in order of arrival; each priority has a limit; none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.authority.wait_queue import ORDER, QueueFullError, Waiter, WaitQueue
from inference.protocol import Priority

LIMITS = {Priority.HIGH: 3, Priority.NORMAL: 4, Priority.LOW: 5}
arrivals = st.lists(st.sampled_from(list(Priority)), max_size=25)


def filled(coming: list[Priority]) -> tuple[WaitQueue, list[Waiter]]:
    queue, taken = WaitQueue(), []
    for number, priority in enumerate(coming):
        waiter = Waiter(number, priority)
        if sum(other.priority is priority for other in taken) < LIMITS[priority]:
            queue = queue.push(waiter, LIMITS)
            taken.append(waiter)
        else:
            with pytest.raises(QueueFullError):
                queue.push(waiter, LIMITS)
    return queue, taken


@given(arrivals)
def test_order_is_by_class_then_arrival(coming: list[Priority]) -> None:
    queue, taken = filled(coming)
    assert list(queue.waiters) == sorted(taken, key=lambda waiter: (ORDER.index(waiter.priority), waiter.id))
    assert len(queue) == len(taken)
    for index, waiter in enumerate(queue.waiters):
        assert queue.position(waiter.id) == index
    assert queue.position(-1) is None


@given(arrivals, st.integers(0, 30))
def test_removing_a_request_is_idempotent(coming: list[Priority], id: int) -> None:
    queue, taken = filled(coming)
    without = queue.remove(id)
    assert len(queue) - len(without) == sum(waiter.id == id for waiter in taken)
    assert without.remove(id) is without


def test_request_cannot_wait_twice() -> None:
    waiter = Waiter(1, Priority.LOW)
    with pytest.raises(ValueError, match="is already in the queue"):
        WaitQueue().push(waiter, LIMITS).push(waiter, LIMITS)


def test_isolated_request_is_first_and_may_join_the_others() -> None:
    queue = WaitQueue().push(Waiter(1, Priority.HIGH), LIMITS)
    queue = queue.push(Waiter(2, Priority.LOW, alone=True), LIMITS)
    queue = queue.push(Waiter(3, Priority.LOW, alone=True), LIMITS)
    assert [waiter.id for waiter in queue.waiters] == [2, 3, 1]
    joined = queue.clear_alone(3)
    assert [(waiter.id, waiter.alone) for waiter in joined.waiters] == [(2, True), (3, False), (1, False)]
    assert joined.push(Waiter(4, Priority.LOW, alone=True), LIMITS).position(4) == 1


def test_requeued_request_is_accepted_by_a_full_queue() -> None:
    queue = WaitQueue()
    for number in range(LIMITS[Priority.HIGH]):
        queue = queue.push(Waiter(number, Priority.HIGH), LIMITS)
    with pytest.raises(QueueFullError):
        queue.push(Waiter(99, Priority.HIGH, alone=True), LIMITS)
    assert queue.push(Waiter(99, Priority.HIGH, alone=True), None).position(99) == 0
