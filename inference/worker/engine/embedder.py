"""The engine of embedding and reranking models: one vector per input. `PoolQueue` decides what goes into a batch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from inference.protocol import Code, Priority
from inference.worker.backend import OK
from inference.worker.engine.engine_thread import EngineThread
from inference.worker.engine.output_tickets import Ticket
from inference.worker.engine.pooling_schedule import Input, PoolQueue
from inference.worker.engine_stats import EngineCounters
from inference.worker.llama.context import Context
from inference.worker.steps import Row
from inference.worker.worker_errors import WorkerError

log = logging.getLogger("headgate.worker.embedder")

MAX_QUEUED_TOKENS = 2**22
"""16 MiB of token ids. The largest request does not count: an empty queue accepts a request of any size, and a large
request does not block small ones."""


@dataclass(frozen=True, slots=True)
class Vector:
    """The result of one input: `values` (float32) or `error`.

    `values` is an embedding, scaled to Euclidean length 1, or the raw outputs of a reranker.
    """

    index: int
    values: np.ndarray | None = None
    error: WorkerError | None = None


_Input = Input[Ticket[Vector]]


class Embedder:
    """Computes vectors on its own thread; the interface follows `Engine`."""

    def __init__(
        self,
        backend: Context,
        queue: int,
        deliver: Callable[[list[tuple[Ticket[Vector], Vector]]], None],
        on_fatal: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        scales: bool = True,
    ) -> None:
        """`backend`: a context with pooling. `scales`: vectors are scaled to length 1."""
        self.counters = EngineCounters(clock)
        self._scales = scales
        self._backend = backend
        self._max_waiting = queue
        self._deliver = deliver
        self._clock = clock
        self._queue: PoolQueue[Ticket[Vector]] = PoolQueue(backend.n_slots, backend.pool_tokens)
        self._unanswered: Sequence[_Input] = []
        """Inputs that were taken from the queue and have no result yet."""
        self._lock = threading.Lock()
        self._runner = EngineThread("embedder", self._iterate, self._close, on_fatal)

    def start(self) -> None:
        """Starts the thread."""
        self._runner.start()

    def submit(
        self,
        inputs: Sequence[Sequence[int]],
        ticket: Ticket[Vector],
        deadline: float | None = None,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        """Queues token lists; the ticket gets one Vector per input. Raises WorkerError(QUEUE_FULL)."""
        with self._lock:
            waiting = self._queue.requests
            if waiting > 0 and waiting >= self._max_waiting:
                raise WorkerError(
                    Code.QUEUE_FULL,
                    f"the queue of this model is full: waiting requests={waiting}, limit={self._max_waiting}; "
                    f"try again later",
                )
            if (tokens := self._queue.weight(inputs)) > MAX_QUEUED_TOKENS:
                raise WorkerError(
                    Code.QUEUE_FULL,
                    f"the queue of this model is full: queued tokens={tokens} (without the largest request), "
                    f"limit={MAX_QUEUED_TOKENS}; try again later",
                )
            self._queue.add(ticket, inputs, self._clock(), priority, deadline)
        self._runner.wake()

    def abort(self, ticket: Ticket[Vector]) -> None:
        """Removes the waiting inputs of a request."""
        with self._lock:
            self._queue.drop(ticket)

    def stop(self, reason: WorkerError, seconds: float = 5.0) -> bool:
        """Ends all requests with `reason` after the running step. Returns whether the thread ended within `seconds`."""
        return self._runner.stop(reason, seconds)

    def _iterate(self) -> bool:
        if batch := self._next():
            self._compute(batch)
        return bool(batch or self.counters.queued)

    def _close(self, reason: WorkerError) -> None:
        if self.counters.step_started is not None:
            self.counters.end()
        with self._lock:
            self._unanswered = [*self._unanswered, *self._queue.clear()]
        self.counters.active = self.counters.queued = 0
        self._answer([(item.owner, Vector(item.index, error=reason)) for item in self._unanswered])
        self._unanswered = []

    def _answer(self, vectors: list[tuple[Ticket[Vector], Vector]]) -> None:
        if vectors:
            self._deliver(vectors)

    def _next(self) -> Sequence[_Input]:
        """The next batch. Inputs that are past their deadline or too long get an error."""
        with self._lock:
            batch = self._queue.take(self._clock())
            self.counters.queued = self._queue.inputs
            self._unanswered = [*batch.chosen, *batch.late, *batch.unfit]
        ended = [(item, _too_late()) for item in batch.late]
        ended += [(item, _too_long(len(item.tokens), self._backend.pool_tokens)) for item in batch.unfit]
        self._answer([(item.owner, Vector(item.index, error=error)) for item, error in ended])
        self._unanswered = batch.chosen
        return batch.chosen

    def _compute(self, batch: Sequence[_Input]) -> None:
        rows = [Row(number, number, 0, item.tokens, True) for number, item in enumerate(batch)]
        total = sum(len(item.tokens) for item in batch)
        self.counters.active = len(batch)
        self.counters.begin(total)
        try:
            status, pooled = self._backend.pool(rows)
            failure = None if status is OK else f"llama.cpp could not compute a step ({status.name.lower()})"
            vectors = [self._vector(item.index, values) for item, values in zip(batch, pooled, strict=failure is None)]
        except BaseException as error:
            log.exception("internal error: a step of the embedder failed")
            vectors, failure = [], f"the engine failed ({type(error).__name__}: {error})"
        seconds = self.counters.end()
        self._queue.computed(seconds)
        self.counters.active = 0
        if failure is None:
            self._runner.succeeded()
            self.counters.prompt_tokens += total
            self.counters.prefill = self.counters.prefill.with_step(total, seconds)
        else:
            reason = WorkerError(Code.MODEL_FAILED, failure)
            vectors = [Vector(item.index, error=reason) for item in batch]
        self._answer([(item.owner, vector) for item, vector in zip(batch, vectors, strict=True)])
        self._unanswered = []
        if failure is not None:
            self._runner.failed(failure)

    def _vector(self, index: int, values: np.ndarray) -> Vector:
        if not np.isfinite(values).all():
            return Vector(index, error=WorkerError(Code.MODEL_FAILED, "the model returned values that are not finite"))
        return Vector(index, normalized(values) if self._scales else values)


def _too_late() -> WorkerError:
    return WorkerError(Code.DEADLINE_EXCEEDED, "the model did not answer within the deadline")


def _too_long(tokens: int, most: int) -> WorkerError:
    """For an input that validation missed: llama.cpp would abort the process."""
    return WorkerError(Code.MODEL_FAILED, f"the input has {tokens} tokens; this model accepts at most {most}")


def normalized(values: np.ndarray) -> np.ndarray:
    """`values` scaled to length 1; zeros stay zeros."""
    length = float(np.linalg.norm(values))
    return values if length == 0.0 else (values / length).astype(np.float32)
