"""An engine's thread that something unforeseen ended: the next request waited for ever and the heartbeat looked idle.

Panics of Rust libraries arrive as BaseException, which `except Exception` lets through.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from headgate.shared.parameters import Sampling
from inference.protocol import Code
from inference.worker.backend import BatchRow, Constraint, Decode
from inference.worker.engine.embedder import Embedder, Vector
from inference.worker.engine.engine import Engine
from inference.worker.engine.engine_thread import FATAL_FAILURES, EngineThread
from inference.worker.engine.engine_work import Work
from inference.worker.engine.output_tickets import OutputDispatcher, Ticket
from inference.worker.steps import Limits
from inference.worker.worker_errors import WorkerError
from tests.rigs.fake_backend import ByteVocabulary, FakeBackend, FakeSampler

LIMITS = Limits(slots=2, context=100, batch=32, queue=4)
GONE = WorkerError(Code.MODEL_LOADING, "the end")


class Panic(BaseException):
    """As a Rust library raises it."""


class PanickyConstraint:
    """Panics where its mask begins."""

    def start(self) -> Any:
        raise Panic("copy")


@dataclass
class Shop:
    """Samplers that start a constraint's mask, and that do what `sample` and `close` do where those are given."""

    sample: Callable[[], int] | None = None
    close: Callable[[], None] | None = None

    def __call__(self, sampling: Sampling, choice: int, most: int, constraint: Constraint | None = None) -> FakeSampler:
        if constraint is not None:
            constraint.start()
        sampler = FakeSampler(b"ab")
        if sampling.seed == 1 and self.sample is not None:
            sampler.sample = lambda _index: self.sample()  # type: ignore[method-assign, misc]
        if sampling.seed == 1 and self.close is not None:
            sampler.close = self.close  # type: ignore[method-assign]
        return sampler


@dataclass
class Post:
    """Delivers through a courier, unless told to break."""

    courier: OutputDispatcher
    breaks: int = 0

    def deliver(self, batch: list[Any]) -> None:
        if self.breaks:
            self.breaks -= 1
            raise Panic("deliver")
        self.courier.deliver(batch)


@dataclass
class Bench:
    """An engine and what it said."""

    shop: Shop = field(default_factory=Shop)
    backend: FakeBackend = field(default_factory=FakeBackend)
    fatal: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.post = Post(OutputDispatcher(asyncio.get_running_loop()))
        self.engine = Engine(
            self.backend, ByteVocabulary(), self.shop, LIMITS, self.post.deliver, self.fatal.append, lambda: 100.0
        )

    async def __aenter__(self) -> Bench:
        self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert await asyncio.to_thread(self.engine.stop, GONE), "the thread does not end"

    def ask(self, **changes: Any) -> Ticket[Any]:
        ticket: Ticket[Any] = Ticket(asyncio.get_running_loop())
        said: dict[str, Any] = {"prompts": [[1, 2]], "n": 1, "sampling": Sampling(), "max_tokens": 4, **changes}
        self.engine.submit(Work(**said), ticket)
        return ticket


async def end_of(ticket: Ticket[Any]) -> str | Code:
    """How the request ended."""
    while True:
        outputs = await ticket.take(10)
        assert outputs, "the engine went silent"
        for output in outputs:
            if output.error is not None:
                return output.error.code
            if output.finish is not None:
                return output.finish


def _panic() -> Any:
    raise Panic("here")


async def test_a_panic_at_the_start_of_a_mask_ends_one_request() -> None:
    async with Bench() as bench:
        assert await end_of(bench.ask(constraint=PanickyConstraint())) is Code.MODEL_FAILED
        assert await end_of(bench.ask()) == "stop"
    assert bench.fatal == []


@pytest.mark.parametrize("where", ["sample", "close"])
async def test_a_panic_of_a_sampler_ends_one_request(where: str) -> None:
    """One that cannot be freed had its answer already."""
    async with Bench(Shop(**{where: _panic})) as bench:
        broken, sound = bench.ask(sampling=Sampling(seed=1)), bench.ask()
        assert await end_of(broken) == (Code.MODEL_FAILED if where == "sample" else "stop")
        assert await end_of(sound) == "stop"
        assert await end_of(bench.ask()) == "stop"
    assert bench.fatal == []


async def test_a_panic_in_a_step_ends_the_requests_in_it() -> None:
    backend = FakeBackend()
    backend.fates.append(Panic("decode"))  # type: ignore[arg-type]
    backend.decode = _raising(backend)  # type: ignore[method-assign]
    async with Bench(backend=backend) as bench:
        assert await end_of(bench.ask()) is Code.MODEL_FAILED
        assert bench.engine.counters.step_started is None
        assert await end_of(bench.ask()) == "stop"
    assert bench.fatal == []


def _raising(backend: FakeBackend) -> Any:
    """`decode` that raises whatever stands among the fates."""
    decode = backend.decode

    def instead(rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
        if backend.fates and isinstance(backend.fates[0], BaseException):
            raise backend.fates.popleft()
        return decode(rows)

    return instead


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
async def test_what_is_nobodys_request_ends_all_and_is_told(error: BaseException) -> None:
    """And whoever comes later is told too, as long as the process lives."""

    def sample() -> int:
        raise error

    backend = FakeBackend()
    backend.gate = threading.Semaphore(0)
    async with Bench(Shop(sample=sample), backend) as bench:
        asked = [bench.ask(sampling=Sampling(seed=1)), bench.ask(), bench.ask()]
        backend.gate.release(1000)
        assert {await end_of(ticket) for ticket in asked} == {Code.MODEL_FAILED}
        assert [await end_of(bench.ask()) for _ in range(10)] == [Code.MODEL_FAILED] * 10
        assert bench.engine.counters.step_started is None
        assert len(bench.fatal) == 1
        assert type(error).__name__ in bench.fatal[0]


async def test_what_could_not_be_delivered_is_delivered_with_the_end() -> None:
    async with Bench() as bench:
        bench.post.breaks = 1
        ticket = bench.ask(max_tokens=1)
        assert await end_of(ticket) == "length"
        assert await end_of(bench.ask()) is Code.MODEL_FAILED
        assert len(bench.fatal) == 1


class _Turns:
    """A runner whose turns and ends do as told."""

    def __init__(self, turn: Callable[[], bool], end: Callable[[WorkerError], None] = lambda _: None) -> None:
        self.fatal: list[str] = []
        self.told = threading.Event()
        self.reasons: list[WorkerError] = []
        self._inner = end
        self.runner = EngineThread("turns", turn, self._end, self._fatal)

    def _end(self, reason: WorkerError) -> None:
        self.reasons.append(reason)
        self._inner(reason)

    def _fatal(self, message: str) -> None:
        self.fatal.append(message)
        self.told.set()
        raise Panic("nobody listens")


def test_a_runner_survives_whoever_it_tells() -> None:
    """Neither `end` nor `on_fatal` can keep the thread from being stopped."""
    turns = _Turns(_panic, lambda _reason: _panic())
    turns.runner.start()
    assert turns.told.wait(10)
    turns.runner.wake()
    assert turns.runner.stop(GONE, 10)
    assert turns.fatal == ["the engine failed (Panic: here)"]
    assert {reason.code for reason in turns.reasons} == {Code.MODEL_FAILED}


def test_a_runner_that_is_stopped_first_tells_no_failure() -> None:
    entered, leave = threading.Event(), threading.Event()

    def turn() -> bool:
        entered.set()
        assert leave.wait(10)
        raise Panic("late")

    turns = _Turns(turn)
    turns.runner.start()
    assert entered.wait(10)
    assert not turns.runner.stop(GONE, 0.0)
    leave.set()
    assert turns.runner.stop(GONE, 10)
    assert (turns.fatal, turns.reasons) == ([], [GONE])


@dataclass
class PanickyPooling:
    """Panics for the first `panics` batches; leaves out the vectors of those after them while `short`."""

    panics: int = 0
    short: bool = False
    raises: type[BaseException] = Panic
    n_slots: int = 2
    pool_tokens: int = 10

    def pool(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[np.ndarray]]:
        if self.panics:
            self.panics -= 1
            raise self.raises
        return Decode.OK, [] if self.short else [np.ones(2, np.float32) for _ in rows]


def _embedder(backend: PanickyPooling, fatal: list[str]) -> tuple[Embedder, Post]:
    post = Post(OutputDispatcher(asyncio.get_running_loop()))
    embedder = Embedder(backend, 8, post.deliver, fatal.append, lambda: 100.0)
    return embedder, post


async def _vectors(embedder: Embedder, count: int, deadline: float | None = None) -> list[bool]:
    """Whether each of `count` inputs came to a vector."""
    ticket: Ticket[Vector] = Ticket(asyncio.get_running_loop())
    embedder.submit([[1, 2]] * count, ticket, deadline)
    found: dict[int, bool] = {}
    while len(found) < count:
        vectors = await ticket.take(10)
        assert vectors, "the thread went silent"
        for vector in vectors:
            assert vector.index not in found
            found[vector.index] = vector.error is None
    return [found[index] for index in range(count)]


async def test_a_panic_while_pooling_ends_its_batch() -> None:
    fatal: list[str] = []
    embedder, _post = _embedder(PanickyPooling(panics=1), fatal)
    embedder.start()
    assert await _vectors(embedder, 3) in ([False, False, True], [False, True, True])
    assert await asyncio.to_thread(embedder.stop, GONE)
    assert fatal == []


async def test_missing_vectors_end_their_batch() -> None:
    fatal: list[str] = []
    backend = PanickyPooling(short=True)
    embedder, _post = _embedder(backend, fatal)
    embedder.start()
    assert await _vectors(embedder, 1) == [False]
    backend.short = False
    assert await _vectors(embedder, 1) == [True]
    assert await asyncio.to_thread(embedder.stop, GONE)
    assert fatal == []


@pytest.mark.parametrize("late", [False, True])
async def test_an_embedder_that_cannot_deliver_ends_every_input(late: bool) -> None:
    """Those that were being computed or were refused too."""
    fatal: list[str] = []
    embedder, post = _embedder(PanickyPooling(), fatal)
    post.breaks = 1
    embedder.start()
    assert not all(await _vectors(embedder, 5, 50.0 if late else None))
    assert await _vectors(embedder, 2) == [False, False]
    assert await asyncio.to_thread(embedder.stop, GONE)
    assert len(fatal) == 1


async def test_what_is_no_failure_of_a_batch_ends_the_embedder() -> None:
    fatal: list[str] = []
    embedder, _post = _embedder(PanickyPooling(panics=FATAL_FAILURES, raises=SystemExit), fatal)
    embedder.start()
    assert await _vectors(embedder, 5) == [False] * 5
    assert embedder.counters.step_started is None
    assert await asyncio.to_thread(embedder.stop, GONE)
    assert len(fatal) == 1
