"""The embedder with a fake backend: batches, limits and invalid values. Each input ends once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from inference.protocol import Code, Priority
from inference.worker.backend import BatchRow, Decode
from inference.worker.engine.embedder import MAX_QUEUED_TOKENS, Embedder, Vector
from inference.worker.engine.output_tickets import OutputDispatcher, Ticket
from inference.worker.worker_errors import WorkerError

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
    courier = OutputDispatcher(asyncio.get_running_loop())
    embedder = Embedder(backend, 4, courier.deliver, lambda _message: None, lambda: 100.0, scales=request.param)
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


async def test_values_that_are_not_finite_end_only_their_input(bench: Bench) -> None:
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
