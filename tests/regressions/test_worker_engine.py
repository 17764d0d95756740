"""Engine thread: failures, deadlines, pace of prefill, heartbeats."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from headgate.shared.parameters import Sampling
from inference.protocol import Code
from inference.worker.answers.generation import Output
from inference.worker.api.worker_app import App
from inference.worker.backend import BatchRow, Constraint, Decode
from inference.worker.engine.embedder import Embedder, Vector
from inference.worker.engine.engine import Engine
from inference.worker.engine.engine_thread import FATAL_FAILURES, EngineThread
from inference.worker.engine.engine_work import Work
from inference.worker.engine.output_tickets import Delivery, OutputDispatcher, Ticket
from inference.worker.engine.prefill_pacing import LARGEST_DISCOUNT, STEP_SECONDS, Pace
from inference.worker.engine_stats import HUNG_STEP_SECONDS, EngineCounters
from inference.worker.prompt.prompts import Prompts
from inference.worker.service import longer
from inference.worker.steps import Limits
from inference.worker.worker_errors import UnloadedError, WorkerError
from inference.worker.worker_requests import Facts
from inference.worker_link import Heartbeat
from tests.regressions.test_worker_intake import Bytes
from tests.rigs.fake_backend import ByteVocabulary, FakeBackend, FakeSampler, SamplerShop
from tests.rigs.processes import wait_until

LIMITS = Limits(slots=2, context=100, batch=32, queue=4)
GONE = WorkerError(Code.MODEL_LOADING, "the end")


class Panic(BaseException):
    """As a Rust library raises it."""


class PanickyConstraint:
    """Panics when its mask starts."""

    def start(self) -> Any:
        raise Panic("copy")


@dataclass
class PanickySamplers:
    """Samplers that start the mask of a constraint; with seed 1 they call `sample` and `close`."""

    sample: Callable[[], int] | None = None
    close: Callable[[], None] | None = None

    def __call__(self, sampling: Sampling, choice: int, constraint: Constraint | None = None) -> FakeSampler:
        if constraint is not None:
            constraint.start()
        sampler = FakeSampler(b"ab")
        if sampling.seed == 1 and self.sample is not None:
            sampler.sample = lambda _index: self.sample()  # type: ignore[method-assign, misc]
        if sampling.seed == 1 and self.close is not None:
            sampler.close = self.close  # type: ignore[method-assign]
        return sampler


@dataclass
class FailingDelivery:
    """Delivers through a dispatcher; the first `breaks` deliveries raise."""

    dispatcher: OutputDispatcher
    breaks: int = 0

    def deliver(self, batch: list[Any]) -> None:
        if self.breaks:
            self.breaks -= 1
            raise Panic("deliver")
        self.dispatcher.deliver(batch)


@dataclass
class EngineBench:
    """An engine and the fatal errors that it reported."""

    shop: PanickySamplers = field(default_factory=PanickySamplers)
    backend: FakeBackend = field(default_factory=FakeBackend)
    fatal: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.delivery = FailingDelivery(OutputDispatcher(asyncio.get_running_loop()))
        self.engine = Engine(
            self.backend, ByteVocabulary(), self.shop, LIMITS, self.delivery.deliver, self.fatal.append, lambda: 100.0
        )

    async def __aenter__(self) -> EngineBench:
        self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert await asyncio.to_thread(self.engine.stop, GONE), "the thread does not end"

    def ask(self, **changes: Any) -> Ticket[Any]:
        ticket: Ticket[Any] = Ticket(asyncio.get_running_loop())
        work: dict[str, Any] = {"prompts": [[1, 2]], "n": 1, "sampling": Sampling(), "max_tokens": 4, **changes}
        self.engine.submit(Work(**work), ticket)
        return ticket


async def end_of(ticket: Ticket[Any]) -> str | Code:
    """How the request ended."""
    while True:
        outputs = await ticket.take(10)
        assert outputs, "the engine sends no more outputs"
        for output in outputs:
            if output.error is not None:
                return output.error.code
            if output.finish is not None:
                return output.finish


async def test_commands_for_sequences_fail_at_once_when_the_engine_has_ended() -> None:
    """Also those that come while it ends."""
    async with EngineBench() as bench:
        engine = bench.engine
        stopping = asyncio.create_task(asyncio.to_thread(engine.stop, GONE))
        futures: list[Future[Any]] = []
        while not stopping.done():
            futures.append(engine.kv_sequences())
            await asyncio.sleep(0)
    late: list[Future[Any]] = [engine.kv_sequences(), engine.clear_kv(None), engine.pin_kv(["a"], 1.0)]
    assert {future.exception(1) for future in late} == {GONE}
    assert {future.exception(1) for future in futures} <= {None, GONE}


def _panic() -> Any:
    raise Panic("here")


async def test_panic_at_the_start_of_a_mask_fails_one_request() -> None:
    async with EngineBench() as bench:
        assert await end_of(bench.ask(constraint=PanickyConstraint())) is Code.MODEL_FAILED
        assert await end_of(bench.ask()) == "stop"
    assert bench.fatal == []


@pytest.mark.parametrize("where", ["sample", "close"])
async def test_panic_of_a_sampler_fails_one_request(where: str) -> None:
    """A sampler is closed after its answer."""
    async with EngineBench(PanickySamplers(**{where: _panic})) as bench:
        broken, sound = bench.ask(sampling=Sampling(seed=1)), bench.ask()
        assert await end_of(broken) == (Code.MODEL_FAILED if where == "sample" else "stop")
        assert await end_of(sound) == "stop"
        assert await end_of(bench.ask()) == "stop"
    assert bench.fatal == []


async def test_undelivered_output_is_delivered_when_the_engine_ends() -> None:
    async with EngineBench() as bench:
        bench.delivery.breaks = 1
        ticket = bench.ask(max_tokens=1)
        assert await end_of(ticket) == "length"
        assert await end_of(bench.ask()) is Code.MODEL_FAILED
        assert len(bench.fatal) == 1


class RecordingThread:
    """An engine thread with the given turn and end; `on_fatal` records the message and raises."""

    def __init__(self, turn: Callable[[], bool], end: Callable[[WorkerError], None] = lambda _: None) -> None:
        self.fatal: list[str] = []
        self.reported = threading.Event()
        self.reasons: list[WorkerError] = []
        self._inner = end
        self.runner = EngineThread("turns", turn, self._end, self._fatal)

    def _end(self, reason: WorkerError) -> None:
        self.reasons.append(reason)
        self._inner(reason)

    def _fatal(self, message: str) -> None:
        self.fatal.append(message)
        self.reported.set()
        raise Panic("in on_fatal")


def test_engine_thread_can_be_stopped_after_its_callbacks_raised() -> None:
    turns = RecordingThread(_panic, lambda _reason: _panic())
    turns.runner.start()
    assert turns.reported.wait(10)
    turns.runner.wake()
    assert turns.runner.stop(GONE, 10)
    assert turns.fatal == ["the engine failed (Panic: here)"]
    assert {reason.code for reason in turns.reasons} == {Code.MODEL_FAILED}


def test_panic_after_a_stop_is_not_reported() -> None:
    entered, leave = threading.Event(), threading.Event()

    def turn() -> bool:
        entered.set()
        assert leave.wait(10)
        raise Panic("late")

    turns = RecordingThread(turn)
    turns.runner.start()
    assert entered.wait(10)
    assert not turns.runner.stop(GONE, 0.0)
    leave.set()
    assert turns.runner.stop(GONE, 10)
    assert (turns.fatal, turns.reasons) == ([], [GONE])


@dataclass
class PanickyPooling:
    """Panics for the first `panics` batches; returns no vectors while `short`."""

    panics: int = 0
    short: bool = False
    n_slots: int = 2
    pool_tokens: int = 10

    def pool(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[np.ndarray]]:
        if self.panics:
            self.panics -= 1
            raise Panic
        return Decode.OK, [] if self.short else [np.ones(2, np.float32) for _ in rows]


def _embedder(backend: PanickyPooling, fatal: list[str]) -> tuple[Embedder, FailingDelivery]:
    delivery = FailingDelivery(OutputDispatcher(asyncio.get_running_loop()))
    embedder = Embedder(backend, 8, delivery.deliver, fatal.append, lambda: 100.0)
    return embedder, delivery


async def _vectors(embedder: Embedder, count: int, deadline: float | None = None) -> list[bool]:
    """Whether each of `count` inputs got a vector."""
    ticket: Ticket[Vector] = Ticket(asyncio.get_running_loop())
    embedder.submit([[1, 2]] * count, ticket, deadline)
    found: dict[int, bool] = {}
    while len(found) < count:
        vectors = await ticket.take(10)
        assert vectors, "the thread sends no more vectors"
        for vector in vectors:
            assert vector.index not in found
            found[vector.index] = vector.error is None
    return [found[index] for index in range(count)]


async def test_panic_while_pooling_fails_its_batch() -> None:
    fatal: list[str] = []
    embedder, _delivery = _embedder(PanickyPooling(panics=1), fatal)
    embedder.start()
    assert await _vectors(embedder, 3) in ([False, False, True], [False, True, True])
    assert await asyncio.to_thread(embedder.stop, GONE)
    assert fatal == []


async def test_missing_vectors_fail_their_batch() -> None:
    fatal: list[str] = []
    backend = PanickyPooling(short=True)
    embedder, _delivery = _embedder(backend, fatal)
    embedder.start()
    assert await _vectors(embedder, 1) == [False]
    backend.short = False
    assert await _vectors(embedder, 1) == [True]
    assert await asyncio.to_thread(embedder.stop, GONE)
    assert fatal == []


@pytest.mark.parametrize("late", [False, True])
async def test_embedder_that_cannot_deliver_fails_every_input(late: bool) -> None:
    fatal: list[str] = []
    embedder, delivery = _embedder(PanickyPooling(), fatal)
    delivery.breaks = 1
    embedder.start()
    assert await _vectors(embedder, 5, 50.0 if late else None) == [False] * 5
    assert await _vectors(embedder, 2) == [False, False]
    assert await asyncio.to_thread(embedder.stop, GONE)
    assert len(fatal) == 1


async def test_repeated_panics_while_pooling_end_the_embedder() -> None:
    """It is reported after the batch has its errors."""
    fatal: list[str] = []
    embedder, _delivery = _embedder(PanickyPooling(panics=FATAL_FAILURES), fatal)
    embedder.start()
    assert await _vectors(embedder, 5) == [False] * 5
    await asyncio.to_thread(wait_until, "the failure is reported", lambda: bool(fatal))
    assert embedder.counters.step_started is None
    assert await asyncio.to_thread(embedder.stop, GONE)
    assert len(fatal) == 1


DEADLINE = 5.0
TURN_SECONDS = 1.0


def deliver(batch: list[Delivery]) -> None:
    for ticket, output in batch:
        ticket.put(output)


class ClockedEngine:
    """An engine with two slots whose turns take a second each of a test clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.engine = Engine(
            FakeBackend(),
            ByteVocabulary(),
            SamplerShop(),
            Limits(slots=2, context=100, batch=64, queue=20),
            deliver,
            lambda _message: None,
            clock=lambda: self.now,
        )

    def ask(self, **changes: object) -> Ticket[Output]:
        ticket: Ticket[Output] = Ticket(asyncio.get_running_loop())
        work = {
            "prompts": [list(b"hi")],
            "n": 1,
            "sampling": Sampling(),
            "max_tokens": 50,
            "deadline": DEADLINE,
            **changes,
        }
        self.engine.submit(Work(**work), ticket)  # type: ignore[arg-type]
        return ticket

    def run(self) -> None:
        while self.engine._iterate():
            self.now += TURN_SECONDS


async def ends(ticket: Ticket[Output]) -> dict[int, str | Code | None]:
    outputs = await ticket.take(1)
    return {
        output.choice: output.error.code if output.error else output.finish
        for output in outputs
        if output.error or output.finish
    }


@pytest.mark.parametrize("work", [{"n": 6}, {"prompts": [[97 + n] for n in range(6)]}], ids=["n", "prompts"])
async def test_deadline_for_a_first_token_does_not_end_a_request_that_has_begun(work: Mapping[str, object]) -> None:
    """Even if some of its answers still wait for a slot."""
    clocked = ClockedEngine()
    ticket = clocked.ask(**work)
    clocked.run()
    assert clocked.now > 3 * DEADLINE
    assert await ends(ticket) == dict.fromkeys(range(6), "stop")


async def test_request_that_has_not_begun_at_its_deadline_fails_with_all_its_answers() -> None:
    clocked = ClockedEngine()
    first = clocked.ask(n=2)
    late = clocked.ask(n=3)
    clocked.run()
    assert await ends(first) == dict.fromkeys(range(2), "stop")
    assert await ends(late) == dict.fromkeys(range(3), Code.DEADLINE_EXCEEDED)


def test_step_that_was_too_long_shrinks_the_budget_at_any_size() -> None:
    pace = Pace(2048, 2048).observe(800, 800, 10 * LARGEST_DISCOUNT * STEP_SECONDS, STEP_SECONDS, decoding=1, prompts=1)
    assert pace.tokens == 80


async def test_pace_is_learned_from_every_computed_prompt_token() -> None:
    """The clock advances with each reading. The first piece of a prompt has 32 tokens."""
    ticks = itertools.count()
    engine = Engine(
        FakeBackend(),
        ByteVocabulary(),
        SamplerShop(),
        Limits(slots=1, context=600, batch=512, queue=1),
        lambda _batch: None,
        lambda _message: None,
        clock=lambda: next(ticks) * 1e-3,
    )
    engine.submit(
        Work(prompts=[list(b"x" * 400)], n=1, sampling=Sampling(), max_tokens=1), Ticket(asyncio.get_running_loop())
    )
    for _ in range(4):
        engine._iterate()
    pieces = [count for batch in engine._backend.batches for _slot, _start, count in batch]  # type: ignore[attr-defined]
    assert pieces == [32, 160, 208]


FACTS = Facts("tiny", 100, 257, 8, ("completions",))


class SlowBackend(FakeBackend):
    """Its steps take until `enough`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.enough = threading.Event()

    def decode(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
        assert self.enough.wait(20)
        return super().decode(rows)


async def test_progress_comments_continue_during_a_long_step() -> None:
    backend = SlowBackend()
    engine = Engine(
        backend,
        ByteVocabulary(),
        SamplerShop(b"abc"),
        Limits(slots=4, context=100, batch=32, queue=4),
        OutputDispatcher(asyncio.get_running_loop()).deliver,
        lambda _message: None,
    )
    engine.start()
    raw = json.dumps({"prompt": [104, 105], "max_tokens": 1, "stream": True}).encode()
    sent: list[bytes] = []
    unread = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return unread.pop() if unread else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        if body := message.get("body"):
            sent.append(body)
        if sum(body.startswith(b":") for body in sent) == 2:
            backend.enough.set()

    with ThreadPoolExecutor(1) as executor:
        app = App(FACTS, Prompts(Bytes(), None, FACTS), lambda _tokens: "", engine, None, executor)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        try:
            async with asyncio.timeout(8):
                await app(scope, receive, send)
        finally:
            backend.enough.set()
    assert engine.stop(UnloadedError())
    assert sent[-1].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("seconds", "is_computing"), [(0.0, True), (HUNG_STEP_SECONDS, False)])
def test_step_of_hanging_length_does_not_count_as_computing(seconds: float, is_computing: bool) -> None:
    now = 5.0
    counters = EngineCounters(lambda: now)
    assert not counters.is_computing
    counters.begin(1)
    now += seconds
    assert counters.is_computing is is_computing
    counters.end()
    assert not counters.is_computing


BUSY = Heartbeat(step_seconds=0.01, step_tokens=4, active=2, queued=1, prompt_tokens=7, generated_tokens=9)


@pytest.mark.parametrize(
    ("engine", "encoder", "shown"),
    [(0.01, 50.0, (50.0, 64)), (None, 50.0, (50.0, 64)), (9.0, 0.5, (9.0, 4)), (9.0, None, (9.0, 4))],
)
def test_heartbeat_shows_the_longer_of_two_running_steps(
    engine: float | None, encoder: float | None, shown: tuple[float, int]
) -> None:
    beat = Heartbeat(engine, 4, BUSY.active, BUSY.queued, BUSY.prompt_tokens, BUSY.generated_tokens)
    merged = longer(beat, Heartbeat(encoder, 64, 0, 0, 0, 0))
    assert (merged.step_seconds, merged.step_tokens) == shown
    assert (merged.active, merged.queued, merged.prompt_tokens, merged.generated_tokens) == (2, 1, 7, 9)


def test_heartbeat_of_two_idle_threads_shows_no_step() -> None:
    rest = Heartbeat(None, 0, 0, 0, 0, 0)
    assert longer(rest, rest) == rest
