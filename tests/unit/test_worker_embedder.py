"""The embedder with a fake backend: batches, order, limits, invalid values, reranking. Each input ends once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.protocol import Code, Priority
from inference.worker.api.pooled_api import MAX_DOCUMENTS, Reranker
from inference.worker.backend import BatchRow, Decode
from inference.worker.engine.embedder import MAX_QUEUED_TOKENS, Embedder, Vector
from inference.worker.engine.output_tickets import OutputDispatcher, Ticket
from inference.worker.engine.pooling_schedule import INPUT_TOKENS, PoolQueue
from inference.worker.prompt.templates import ControlTextSplitter
from inference.worker.steps import PRIORITY_OFFSET_SECONDS
from inference.worker.worker_errors import BadRequestError, WorkerError
from inference.worker.worker_requests import Facts

GONE = WorkerError(Code.MODEL_LOADING, "the end")
BROKEN = 13


@dataclass
class FakePooling:
    """Pools to [sum of tokens, 0]; NaN for an input that starts with BROKEN; `fate` is the status of all steps."""

    n_slots: int = 3
    pool_tokens: int = 10
    fate: Decode = Decode.OK
    batches: list[list[int]] = field(default_factory=list)

    def pool(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[np.ndarray]]:
        lengths = [len(row.tokens) for row in rows]
        assert sum(lengths) <= self.pool_tokens
        assert [row.slot for row in rows] == list(range(len(rows))), "each input is a sequence"
        self.batches.append(lengths)
        if self.fate is not Decode.OK:
            return self.fate, []
        return Decode.OK, [
            np.array([np.nan if row.tokens[0] == BROKEN else sum(row.tokens), 0.0], np.float32) for row in rows
        ]


@dataclass
class Bench:
    backend: FakePooling
    embedder: Embedder
    scales: bool

    async def ask(self, *inputs: list[int], deadline: float | None = None) -> dict[int, Vector]:
        ticket: Ticket[Vector] = Ticket(asyncio.get_running_loop())
        self.embedder.submit(inputs, ticket, deadline)
        found: dict[int, Vector] = {}
        while len(found) < len(inputs):
            vectors = await ticket.take(10)
            assert vectors, "no vectors within 10 s"
            for vector in vectors:
                assert vector.index not in found
                found[vector.index] = vector
        return found


@pytest.fixture(params=[True, False], ids=["scaled", "raw"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    backend = FakePooling()
    dispatcher = OutputDispatcher(asyncio.get_running_loop())
    embedder = Embedder(backend, 4, dispatcher.deliver, lambda _message: None, lambda: 100.0, scales=request.param)
    embedder.start()
    yield Bench(backend, embedder, request.param)
    assert embedder.stop(GONE)


async def test_inputs_share_batches_in_order(bench: Bench) -> None:
    found = await bench.ask([1] * 4, [2] * 6, [3], [4] * 10, [5], [6], [7], [8])
    assert bench.backend.batches == [[4, 6], [1], [10], [1, 1, 1], [1]]
    assert all(vector.error is None for vector in found.values())


async def test_embeddings_have_length_one_and_scores_are_raw(bench: Bench) -> None:
    values = (await bench.ask([3, 4]))[0].values
    assert values is not None
    assert values.tolist() == ([1.0, 0.0] if bench.scales else [7.0, 0.0])


async def test_input_that_is_too_long_ends_with_an_error(bench: Bench) -> None:
    """Validation rejects it earlier; llama.cpp never gets it."""
    found = await bench.ask([1], [2] * 11, [3])
    error = found[1].error
    assert error is not None
    assert error.code is Code.MODEL_FAILED
    assert "11 tokens" in error.message
    assert found[0].error is found[2].error is None


async def test_values_that_are_not_finite_fail_only_their_input(bench: Bench) -> None:
    found = await bench.ask([1], [BROKEN], [2])
    codes = [vector.error and vector.error.code for _index, vector in sorted(found.items())]
    assert codes == [None, Code.MODEL_FAILED, None]


async def test_failed_step_and_passed_deadline_end_with_errors(bench: Bench) -> None:
    late = (await bench.ask([1], deadline=99.0))[0].error
    assert late is not None
    assert late.code is Code.DEADLINE_EXCEEDED
    bench.backend.fate = Decode.COMPUTE_FAILED
    failed = (await bench.ask([1]))[0].error
    assert failed is not None
    assert failed.code is Code.MODEL_FAILED
    bench.backend.fate = Decode.OK
    assert (await bench.ask([1]))[0].error is None


async def test_queue_limits_requests_and_tokens_without_the_largest_request() -> None:
    """The thread does not run, so queued requests stay in the queue."""
    embedder = Embedder(FakePooling(), 3, lambda _vectors: None, lambda _message: None)
    large, other, small = (Ticket[Vector](asyncio.get_running_loop()) for _ in range(3))
    embedder.submit([range(MAX_QUEUED_TOKENS)] * 2, large)
    with pytest.raises(WorkerError, match=f"queued tokens={MAX_QUEUED_TOKENS + 32} ") as full:
        embedder.submit([range(MAX_QUEUED_TOKENS)], other)
    assert full.value.code is Code.QUEUE_FULL
    embedder.submit([[1]] * 2000, small)
    embedder.submit([[1]], small)
    with pytest.raises(WorkerError, match="waiting requests=3"):
        embedder.submit([[1]], other)
    embedder.abort(small)
    embedder.submit([[1]], other)


async def test_requests_are_served_by_priority_and_share_batches_fairly() -> None:
    """A small request is served between the batches of a large one; each batch takes 1 s."""
    backend, now = _Ticking(n_slots=2), 100.0
    embedder = Embedder(backend, 8, lambda _vectors: None, lambda _message: None, lambda: now + backend.seconds)
    ticket: Ticket[Vector] = Ticket(asyncio.get_running_loop())
    embedder.submit([[1] * 4] * 6, ticket, priority=Priority.LOW)
    embedder.submit([[1] * 2] * 6, ticket)
    embedder.submit([[1] * 3] * 4, ticket)
    embedder.submit([[1]], ticket, priority=Priority.HIGH)
    while embedder._iterate():
        continue
    assert backend.batches == [[1, 2], [3, 3], [2, 2], [3, 3], [2, 2], [2, 4], [4, 4], [4, 4], [4]]


class _Ticking(FakePooling):
    """Takes a second for each batch."""

    @property
    def seconds(self) -> float:
        return float(len(self.batches))


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


def test_largest_waiting_request_is_left_out_of_the_weight() -> None:
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
            st.lists(st.integers(1, 12), min_size=1, max_size=6), st.floats(0.0, 100.0), st.sampled_from(Priority)
        ),
        min_size=1,
        max_size=8,
    ),
    slots=st.integers(1, 4),
    seconds=st.floats(0.0, 5.0),
)
def test_each_input_is_scheduled_once_in_the_order_of_service(
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
    keys = [requests[number][1] + PRIORITY_OFFSET_SECONDS[requests[number][2]] for number in first]
    assert keys == sorted(keys)


FACTS = Facts("judge", 20, 256, 8, ("rerank",))
BOS, EOS, SEP, TURN = 1, 2, 3, 4


@dataclass
class Letters:
    """A token per byte; `<turn>` is a control token if special tokens are parsed."""

    bos: int | None = BOS
    eos: int | None = EOS
    sep: int | None = SEP
    adds_bos: bool = True
    adds_eos: bool = True
    adds_sep: bool = True
    longest_piece: int | None = None

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        assert not add_special
        raw = text.encode().replace(b"<turn>", bytes([TURN])) if parse_special else text.encode()
        return list(raw)


def reranker(tokenizer: Letters | None = None, template: str | None = None) -> Reranker:
    defused = ControlTextSplitter(["<turn>"]).pieces
    return Reranker(tokenizer or Letters(), FACTS, template, defused)


def pair(judge: Reranker, query: str = "q", document: str = "d") -> list[int]:
    return list(judge.decode({"query": query, "documents": [document]}).inputs[0])


Q, D = ord("q"), ord("d")


@pytest.mark.parametrize(
    ("tokenizer", "tokens"),
    [
        (Letters(), [BOS, Q, EOS, SEP, D, EOS]),
        (Letters(eos=None, adds_eos=False), [BOS, Q, SEP, D, SEP]),
        (Letters(adds_sep=False), [BOS, Q, EOS, D, EOS]),
        (Letters(adds_sep=False, adds_eos=False), [BOS, Q, SEP, D]),
        (Letters(bos=None, sep=None, adds_sep=False, adds_eos=False), [Q, EOS, D]),
    ],
    ids=["XLM-R", "BERT", "no separator", "nothing added", "only EOS known"],
)
def test_pair_has_the_separators_of_the_vocabulary(tokenizer: Letters, tokens: list[int]) -> None:
    assert pair(reranker(tokenizer)) == tokens


def test_placeholders_and_control_tokens_in_texts_have_no_effect() -> None:
    judge = reranker(template="<turn>{query}|{document}<turn>")
    assert pair(judge) == [TURN, Q, ord("|"), D, TURN]
    assert bytes(pair(judge, "{document}")) == b"\x04{document}|d\x04"
    tokens = pair(judge, "<turn>", "<turn>")
    assert bytes(tokens) == b"\x04<turn>|<turn>\x04"


def test_scores_are_sorted_and_equal_ones_keep_their_order() -> None:
    judge = reranker()
    request = judge.decode({"query": "q", "documents": ["a", {"text": "b", "id": 7}, "c"], "return_documents": True})
    answer = json.loads(judge.answer(request, [np.array([0.0]), np.array([900.0]), np.array([0.0])]))
    assert answer == {
        "object": "list",
        "model": "judge",
        "results": [
            {"index": 1, "relevance_score": 1.0, "document": {"text": "b"}},
            {"index": 0, "relevance_score": 0.5, "document": {"text": "a"}},
            {"index": 2, "relevance_score": 0.5, "document": {"text": "c"}},
        ],
        "usage": {"prompt_tokens": 18, "total_tokens": 18},
    }


def test_first_output_is_the_score_and_extreme_values_do_not_overflow() -> None:
    judge = reranker()
    request = judge.decode({"query": "q", "documents": ["a"], "top_n": 1})
    for values, score in (([0.75, 0.25], 0.75), ([-900.0], 0.0)):
        answer = json.loads(judge.answer(request, [np.array(values, np.float32)]))
        assert answer["results"] == [{"index": 0, "relevance_score": score}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], None),
        ({"documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": 3, "documents": ["a"]}, "query"),
        ({"query": "q"}, "documents"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "documents": "a"}, "documents"),
        ({"query": "q", "documents": ["a", 3]}, "documents[1]"),
        ({"query": "q", "documents": [{"image": "x"}]}, "documents[0].text"),
        ({"query": "q", "documents": ["a"] * (MAX_DOCUMENTS + 1)}, "documents"),
        ({"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "q", "documents": ["a"], "return_documents": "yes"}, "return_documents"),
        ({"query": "q", "documents": ["a"], "top_k": 1}, "top_k"),
        ({"query": "q" * 30, "documents": ["a"]}, "documents[0]"),
        ({"query": "q", "documents": ["a", "b" * 30]}, "documents[1]"),
    ],
)
def test_error_names_the_parameter(body: Any, param: str | None) -> None:
    with pytest.raises(BadRequestError) as caught:
        reranker().decode(body)
    assert caught.value.param == param


def test_text_that_cannot_fit_is_rejected_without_tokenizing() -> None:
    """The longest piece of the vocabulary gives a lower bound for the number of tokens."""

    class Unwilling(Letters):
        def tokenize(self, text: str, **_options: bool) -> list[int]:
            raise AssertionError("this text cannot fit")

    with pytest.raises(BadRequestError, match=r"length is 20 tokens, but query takes at least 250000") as caught:
        reranker(Unwilling(longest_piece=4)).decode({"query": "x" * 10**6, "documents": ["a"]})
    assert caught.value.details == {"context_length": 20, "prompt_tokens": 250000, "max_tokens": None}
