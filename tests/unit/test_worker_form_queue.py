"""Queue of forms to compile: sharing, limits, deadlines, clients that leave."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inference.protocol import Code
from inference.worker.answers.answer_shape import Shape
from inference.worker.api.worker_app import App
from inference.worker.backend import Constraint
from inference.worker.constraints.compile_queue import FormQueue
from inference.worker.dialects.forms import Form, Literal
from inference.worker.engine.output_tickets import Ticket
from inference.worker.worker_errors import BadRequestError, GoneError, WorkerError
from tests.rigs.fake_mask import FakeConstraint

A, B, C = (Literal(name) for name in "abc")
BAD = Literal("bad")
NOT_SHARED = Literal("not shared")
SLOW = Literal("slow")


class FakeCompiler:
    """Compiles while its gate is open; rejects BAD, does not keep NOT_SHARED, and has another gate for SLOW."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.slow_gate = threading.Event()
        self.begun = threading.Event()
        self.compiled: list[Form] = []
        self.threads: set[str] = set()
        self.kept: dict[bytes, Constraint] = {}
        self.reads = 0

    def read_vocabulary(self) -> None:
        self.reads += 1

    def key(self, form: Form, param: str) -> bytes:
        return repr(form).encode()

    def known(self, key: bytes) -> Constraint | None:
        return self.kept.get(key)

    def compile(self, form: Form, param: str) -> Constraint:
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        self.gate.wait()
        if form == SLOW:
            self.slow_gate.wait()
        key = self.key(form, param)
        if key in self.kept:
            return self.kept[key]
        self.compiled.append(form)
        if form == BAD:
            raise BadRequestError("it cannot be enforced", param)
        constraint = FakeConstraint([])
        return constraint if form == NOT_SHARED else self.kept.setdefault(key, constraint)


@pytest.fixture
def compiler() -> FakeCompiler:
    return FakeCompiler()


class Rig:
    """A queue with its own threads and a constant clock."""

    def __init__(self, compiler: FakeCompiler) -> None:
        self.gone = False
        self.looking = ThreadPoolExecutor(1, thread_name_prefix="looking")
        self.compiling = ThreadPoolExecutor(1, thread_name_prefix="forms")
        self.queue = FormQueue(
            compiler, self.looking, self.compiling, max_waiting=2, seconds=600.0, help_seconds=0.01, clock=lambda: 100.0
        )

    async def request(self, form: Form, *, guaranteed: bool = True, deadline: float | None = None) -> Constraint | None:
        return await self.queue.constraint(form, "f", guaranteed=guaranteed, deadline=deadline, gone=lambda: self.gone)

    async def queue_is(self, count: int) -> None:
        """Wait until `count` forms are compiled or queued."""
        while self.queue.waiting != count:
            await asyncio.sleep(0)

    async def waiters_ready(self) -> None:
        """Wait until each request has done its lookup."""
        for _ in range(2):
            await asyncio.wrap_future(self.looking.submit(lambda: None))

    async def settled(self) -> None:
        """Wait until all submitted work is done."""
        await asyncio.wrap_future(self.compiling.submit(lambda: None))


@pytest.fixture
async def rig(compiler: FakeCompiler) -> AsyncIterator[Rig]:
    rig = Rig(compiler)
    yield rig
    compiler.gate.set()
    compiler.slow_gate.set()
    rig.compiling.shutdown()
    rig.looking.shutdown()


async def _blocked(rig: Rig, compiler: FakeCompiler, form: Form = A) -> asyncio.Task[Constraint | None]:
    """A request whose form is being compiled."""
    compiler.gate.clear()
    first = asyncio.create_task(rig.request(form))
    await asyncio.to_thread(compiler.begun.wait)
    return first


async def test_form_is_compiled_once_on_the_compiling_thread(rig: Rig, compiler: FakeCompiler) -> None:
    constraint = await rig.request(A)
    assert constraint is not None
    assert await rig.request(A) is constraint
    assert compiler.compiled == [A]
    assert {name.rpartition("_")[0] for name in compiler.threads} == {"forms"}


async def test_known_form_is_returned_while_another_is_compiled(rig: Rig, compiler: FakeCompiler) -> None:
    known = await rig.request(B)
    compiler.begun.clear()
    first = await _blocked(rig, compiler)
    assert await rig.request(B) is known
    compiler.gate.set()
    assert await first is not None


async def test_full_queue_rejects_and_a_cancelled_request_makes_room(rig: Rig, compiler: FakeCompiler) -> None:
    first = await _blocked(rig, compiler)
    second = asyncio.create_task(rig.request(B))
    await rig.queue_is(2)
    with pytest.raises(WorkerError) as caught:
        await rig.request(C)
    assert caught.value.code == Code.QUEUE_FULL
    assert await rig.request(C, guaranteed=False) is None
    second.cancel()
    await asyncio.wait([second])
    await rig.queue_is(1)
    third = asyncio.create_task(rig.request(C))
    await rig.queue_is(2)
    compiler.gate.set()
    assert await first is not None
    assert await third is not None
    await rig.settled()
    assert compiler.compiled == [A, C]


async def _others(rig: Rig, form: Form) -> list[asyncio.Task[Constraint | None]]:
    """More requests than the queue holds, all waiting for the form that is being compiled."""
    others = [asyncio.create_task(rig.request(form)) for _ in range(5)]
    await rig.waiters_ready()
    return others


async def test_form_that_many_requests_need_is_compiled_once(rig: Rig, compiler: FakeCompiler) -> None:
    """The limit of the queue counts forms, not requests."""
    first = await _blocked(rig, compiler)
    others = await _others(rig, A)
    assert rig.queue.waiting == 1
    compiler.gate.set()
    assert await asyncio.gather(*others) == [await first] * 5
    assert compiler.compiled == [A]


async def test_all_waiting_requests_get_the_rejection(rig: Rig, compiler: FakeCompiler) -> None:
    first = await _blocked(rig, compiler, BAD)
    others = await _others(rig, BAD)
    compiler.gate.set()
    results = await asyncio.gather(first, *others, return_exceptions=True)
    assert [type(error) for error in results] == [BadRequestError] * 6


async def test_form_that_cannot_be_shared_is_compiled_for_each_request(rig: Rig, compiler: FakeCompiler) -> None:
    first = await _blocked(rig, compiler, NOT_SHARED)
    others = await _others(rig, NOT_SHARED)
    compiler.gate.set()
    found = await asyncio.gather(first, *others)
    assert len(set(map(id, found))) == 6
    assert compiler.compiled == [NOT_SHARED] * 6


async def test_request_whose_form_was_compiled_does_not_wait_for_a_slow_one(rig: Rig, compiler: FakeCompiler) -> None:
    first = await _blocked(rig, compiler)
    slow = asyncio.create_task(rig.request(SLOW))
    await rig.queue_is(2)
    others = await _others(rig, A)
    compiler.gate.set()
    assert await asyncio.wait_for(asyncio.gather(*others), 10) == [await first] * 5
    assert not slow.done()
    compiler.slow_gate.set()
    assert await slow is not None


async def test_many_requests_for_a_form_that_cannot_be_shared_delay_others_by_one(
    rig: Rig, compiler: FakeCompiler
) -> None:
    first = await _blocked(rig, compiler, NOT_SHARED)
    others = await _others(rig, NOT_SHARED)
    another = asyncio.create_task(rig.request(B))
    await rig.queue_is(2)
    compiler.gate.set()
    await asyncio.gather(first, another, *others)
    assert compiler.compiled == [NOT_SHARED, B, *[NOT_SHARED] * 5]


async def test_cancelled_request_does_not_cancel_the_form_of_others(rig: Rig, compiler: FakeCompiler) -> None:
    """Neither while the form waits nor while it is compiled."""
    first = await _blocked(rig, compiler)
    second = asyncio.create_task(rig.request(B))
    await rig.queue_is(2)
    others = await _others(rig, B)
    second.cancel()
    await asyncio.wait([second])
    compiler.gate.set()
    assert await first is not None
    assert len(set(map(id, await asyncio.gather(*others)))) == 1
    assert compiler.compiled == [A, B]
    compiler.kept.clear()
    compiler.begun.clear()
    first = await _blocked(rig, compiler)
    others = await _others(rig, A)
    first.cancel()
    await asyncio.wait([first])
    compiler.gate.set()
    assert len(set(map(id, await asyncio.gather(*others)))) == 1
    assert compiler.compiled == [A, B, A]


async def test_form_is_compiled_for_the_clients_that_stayed(rig: Rig, compiler: FakeCompiler) -> None:
    first = await _blocked(rig, compiler)
    gone = [False, False]
    requests = [
        rig.queue.constraint(B, "f", guaranteed=True, deadline=None, gone=lambda number=number: gone[number])
        for number in range(2)
    ]
    tasks = [asyncio.create_task(request) for request in requests]
    await rig.queue_is(2)
    await rig.waiters_ready()
    gone[0] = True
    compiler.gate.set()
    await first
    with pytest.raises(GoneError):
        await tasks[0]
    assert await tasks[1] is not None
    assert compiler.compiled == [A, B]


async def test_wait_ends_at_the_deadline(rig: Rig, compiler: FakeCompiler) -> None:
    """An optional form is left out instead."""
    first = await _blocked(rig, compiler)
    for deadline in (99.0, 100.01):
        with pytest.raises(WorkerError) as caught:
            await rig.request(B, deadline=deadline)
        assert caught.value.code == Code.DEADLINE_EXCEEDED
        assert await rig.request(B, guaranteed=False, deadline=deadline) is None
    compiler.gate.set()
    await first
    await rig.settled()
    assert compiler.compiled == [A]


async def test_optional_form_is_left_out_if_it_waits_or_cannot_be_compiled(rig: Rig, compiler: FakeCompiler) -> None:
    first = await _blocked(rig, compiler)
    assert await rig.request(B, guaranteed=False) is None
    compiler.gate.set()
    assert await first is not None
    assert await rig.request(BAD, guaranteed=False) is None


async def test_wait_over_the_limit_of_the_queue_is_queue_full(compiler: FakeCompiler) -> None:
    with ThreadPoolExecutor(1) as looking, ThreadPoolExecutor(1) as compiling:
        compiler.gate.clear()
        queue = FormQueue(compiler, looking, compiling, seconds=0.01)
        with pytest.raises(WorkerError) as caught:
            await queue.constraint(A, "f", guaranteed=True, deadline=None, gone=lambda: False)
        assert caught.value.code == Code.QUEUE_FULL
        assert caught.value.retry_after
        compiler.gate.set()


async def test_form_of_a_disconnected_client_is_not_compiled(rig: Rig, compiler: FakeCompiler) -> None:
    first = await _blocked(rig, compiler)
    second = asyncio.create_task(rig.request(B))
    await rig.queue_is(2)
    rig.gone = True
    compiler.gate.set()
    await first
    with pytest.raises(GoneError):
        await second
    assert compiler.compiled == [A]


async def test_vocabulary_is_read_once_without_a_request(
    rig: Rig, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.worker.constraints.compile_queue.IDLE_SECONDS", 0.0)
    for reads in (0, 1, 1):
        rig.queue.idle()
        if not reads:
            rig.queue.busy()
        await asyncio.sleep(0.001)
        await rig.settled()
        assert compiler.reads == reads


async def test_form_that_cannot_be_enforced_is_an_unsupported_parameter(rig: Rig) -> None:
    with pytest.raises(BadRequestError) as caught:
        await rig.request(BAD)
    assert caught.value.code == Code.UNSUPPORTED_PARAMETER
    assert caught.value.param == "f"


async def test_app_requests_the_form_with_deadline_and_client_of_the_request(rig: Rig, compiler: FakeCompiler) -> None:
    """Requests without a form and models that do not generate have none."""
    nothing: Any = None
    ticket: Ticket[Any] = Ticket(asyncio.get_running_loop())
    app = App(nothing, nothing, nothing, None, None, rig.looking, forms=FormQueue(compiler, rig.looking, rig.compiling))
    assert await app._compiled(Shape(), ticket, None) is None
    assert await app._compiled(Shape(form=A, param="f"), ticket, None) is not None
    with pytest.raises(WorkerError) as caught:
        await app._compiled(Shape(form=B, param="f"), ticket, time.monotonic())
    assert caught.value.code == Code.DEADLINE_EXCEEDED
    assert await app._compiled(Shape(form=B, param="f", guaranteed=False), ticket, time.monotonic()) is None
    ticket.leave()
    with pytest.raises(GoneError):
        await app._compiled(Shape(form=B, param="f"), ticket, None)
    assert compiler.compiled == [A]
    assert await App(nothing, nothing, nothing, None, None, rig.looking)._compiled(Shape(form=A), ticket, None) is None
