"""The queue of pooling models: order of service, charged time, batches, and inputs that leave without a vector."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.protocol import Priority
from inference.worker.engine.pooling_schedule import INPUT_TOKENS, PoolQueue
from inference.worker.steps import HEAD_START_SECONDS


def ones(count: int, tokens: int = 1) -> list[list[int]]:
    """`count` inputs of `tokens` tokens."""
    return [[7] * tokens for _ in range(count)]


def names(queue: PoolQueue[str], now: float = 0.0) -> str:
    """The owners of the inputs in the next batch."""
    return "".join(item.owner for item in queue.take(now).chosen)


def served(queue: PoolQueue[str], seconds: float, most: int = 10_000) -> str:
    """The owners of the inputs in the order of computation; each batch takes `seconds`."""
    order = ""
    while queue.requests and len(order) < most:
        order += names(queue)
        queue.computed(seconds)
    return order


def test_batch_is_filled_in_order_without_overtaking_by_shorter_inputs() -> None:
    """Up to the sequences and the tokens of a batch."""
    queue: PoolQueue[str] = PoolQueue(3, 10)
    queue.add("a", [*ones(1, 4), *ones(1, 6), *ones(1, 1)], 0.0)
    queue.add("b", [*ones(1, 10), *ones(4)], 0.0)
    batches = []
    while queue.requests:
        batches.append([(item.owner, item.index, len(item.tokens)) for item in queue.take(0.0).chosen])
    assert batches == [
        [("a", 0, 4), ("a", 1, 6)],
        [("a", 2, 1)],
        [("b", 0, 10)],
        [("b", 1, 1), ("b", 2, 1), ("b", 3, 1)],
        [("b", 4, 1)],
    ]


@pytest.mark.parametrize(("later", "order"), [(0.0, "hnl"), (9.0, "hnl"), (11.0, "nhl"), (59.0, "nhl"), (61.0, "nlh")])
def test_priority_is_an_offset_in_seconds(later: float, order: str) -> None:
    """`high` overtakes requests that came at most 10 s (normal) or 60 s (low) earlier."""
    queue: PoolQueue[str] = PoolQueue(1, 10)
    queue.add("l", ones(1), 0.0, Priority.LOW)
    queue.add("n", ones(1), 0.0)
    queue.add("h", ones(1), later, Priority.HIGH)
    assert served(queue, 0.0) == order


def test_small_request_does_not_wait_for_a_large_one() -> None:
    """Computed time delays the next inputs of the large request."""
    queue: PoolQueue[str] = PoolQueue(2, 100)
    queue.add("L", ones(2000), 0.0)
    assert served(queue, 1.0, 10) == "L" * 10
    queue.add("s", ones(1), 4.9)
    assert served(queue, 1.0, 4) == "sLLL"


def test_large_requests_make_equal_progress() -> None:
    queue: PoolQueue[str] = PoolQueue(4, 100)
    for owner in "xyz":
        queue.add(owner, ones(400), 0.0)
    order = served(queue, 1.0, 600)
    assert {owner: order.count(owner) for owner in "xyz"} == {"x": 200, "y": 200, "z": 200}


@pytest.mark.parametrize("large", [1, 3, 8])
def test_small_request_waits_for_one_batch_of_each_large_one(large: int) -> None:
    """Each large request has already had its share of the time."""
    queue: PoolQueue[str] = PoolQueue(1, 100)
    for owner in "ABCDEFGH"[:large]:
        queue.add(owner, ones(2000), 0.0)
    served(queue, 1.0, 400)
    queue.add("s", ones(1), 400.0)
    assert "s" in served(queue, 1.0, large + 1)


@pytest.mark.parametrize(("arrival", "order"), [(11.9, "cb"), (12.1, "bc")])
def test_each_request_is_charged_for_its_own_tokens(arrival: float, order: str) -> None:
    """Of a batch of 8 s, a request with 3 of 4 tokens is charged 6 s."""
    queue: PoolQueue[str] = PoolQueue(2, 4)
    queue.add("a", ones(1), 0.0)
    queue.add("b", [*ones(1, 3), *ones(1, 4)], 0.0)
    assert names(queue) == "ab"
    queue.computed(8.0)
    queue.add("c", ones(1, 4), arrival)
    assert served(queue, 0.0) == order


def test_late_and_unfit_inputs_leave_the_queue() -> None:
    queue: PoolQueue[str] = PoolQueue(4, 10)
    queue.add("late", ones(2), 0.0, deadline=5.0)
    queue.add("long", [[1], [1] * 11, [2]], 0.0)
    queue.add("good", ones(1), 0.0, deadline=5.1)
    batch = queue.take(5.0)
    assert [(item.owner, item.index) for item in batch.late] == [("late", 0), ("late", 1)]
    assert [(item.owner, item.index) for item in batch.unfit] == [("long", 1)]
    assert [(item.owner, item.index) for item in batch.chosen] == [("long", 0), ("long", 2), ("good", 0)]
    assert queue.requests == 0
    queue.add("long", [[1] * 11], 0.0)
    assert len(queue.take(6.0).unfit) == 1
    queue.computed(1.0)


def test_dropped_request_leaves_the_queue() -> None:
    queue: PoolQueue[str] = PoolQueue(1, 10)
    for owner in "ab":
        queue.add(owner, ones(2), 0.0)
    assert names(queue) == "a"
    queue.drop("a")
    assert (queue.requests, queue.inputs) == (1, 2)
    assert [(item.owner, item.index) for item in queue.clear()] == [("b", 0), ("b", 1)]
    assert (queue.requests, queue.inputs, names(queue)) == (0, 0, "")


def test_largest_request_does_not_count() -> None:
    """The request with the most waiting tokens."""
    queue: PoolQueue[str] = PoolQueue(1, 1000)
    assert queue.weight() == queue.weight(ones(5, 100)) == 0
    queue.add("a", ones(5, 100), 0.0)
    assert queue.weight(ones(1, 3)) == 3 + INPUT_TOKENS
    assert queue.weight(ones(9, 100)) == 5 * (100 + INPUT_TOKENS)
    names(queue)
    assert queue.weight(ones(9, 100)) == 4 * (100 + INPUT_TOKENS)


@given(
    requests=st.lists(
        st.tuples(
            st.lists(st.integers(1, 12), min_size=1, max_size=6),
            st.floats(0.0, 100.0),
            st.sampled_from(Priority),
        ),
        min_size=1,
        max_size=8,
    ),
    slots=st.integers(1, 4),
    seconds=st.floats(0.0, 5.0),
)
def test_each_input_leaves_once_in_the_order_of_service(
    requests: Sequence[tuple[list[int], float, Priority]], slots: int, seconds: float
) -> None:
    """Before anything is computed, the order is that of arrival and head start."""
    queue: PoolQueue[int] = PoolQueue(slots, 10)
    for number, (lengths, arrival, priority) in enumerate(requests):
        queue.add(number, [[1] * length for length in lengths], arrival, priority)
    left: list[tuple[int, int]] = []
    first: list[int] = []
    while queue.requests:
        batch = queue.take(0.0)
        assert len(batch.chosen) <= slots
        assert sum(len(item.tokens) for item in batch.chosen) <= 10
        assert batch.chosen or batch.unfit
        left += [(item.owner, item.index) for item in (*batch.chosen, *batch.unfit)]
        queue.computed(seconds)
        first += [item.owner for item in batch.chosen if item.owner not in first]
    assert sorted(left) == [(number, index) for number, entry in enumerate(requests) for index in range(len(entry[0]))]
    keys = [requests[number][1] + HEAD_START_SECONDS[requests[number][2]] for number in first]
    assert keys == sorted(keys)
