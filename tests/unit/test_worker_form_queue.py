"""Who waits for a form, and for how long: over a compiler that takes as long as it is told."""

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
WORN_OUT = Literal("worn out")


class FakeCompiler:
    """Compiles a form once its gate is open; refuses BAD, and has WORN_OUT anew for everybody."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.compiled: list[Form] = []
        self.threads: set[str] = set()
        self.kept: dict[bytes, Constraint] = {}
        self.looked = 0

    def read_vocabulary(self) -> None:
        self.begun.set()

    def key(self, form: Form, param: str) -> bytes:
        return repr(form).encode()

    def known(self, key: bytes) -> Constraint | None:
        self.looked += 1
        return self.kept.get(key)

    def compile(self, form: Form, param: str) -> Constraint:
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        self.gate.wait()
        key = self.key(form, param)
        if key in self.kept:
            return self.kept[key]
        self.compiled.append(form)
        if form == BAD:
            raise BadRequestError("it cannot be enforced", param)
        constraint = FakeConstraint([])
        return constraint if form == WORN_OUT else self.kept.setdefault(key, constraint)


@pytest.fixture
def compiler() -> FakeCompiler:
    return FakeCompiler()


class Rig:
    """A queue with threads of its own; time stands still."""

    def __init__(self, compiler: FakeCompiler) -> None:
        self.gone = False
        self.looking = ThreadPoolExecutor(1, thread_name_prefix="looking")
        self.compiling = ThreadPoolExecutor(1, thread_name_prefix="forms")
        self.queue = FormQueue(
            compiler, self.looking, self.compiling, most=2, seconds=600.0, help_seconds=0.01, clock=lambda: 100.0
        )

    async def ask(self, form: Form, *, promised: bool = True, deadline: float | None = None) -> Constraint | None:
        return await self.queue.constraint(form, "f", promised=promised, deadline=deadline, gone=lambda: self.gone)

    async def queue_is(self, count: int) -> None:
        """Once so many forms are compiled or wait."""
        while self.queue.waiting != count:
            await asyncio.sleep(0)

    async def looked(self) -> None:
        """Once all who asked wait: each looks once, on a thread that serves them in turn."""
        for _ in range(2):
            await asyncio.wrap_future(self.looking.submit(lambda: None))

    async def settled(self) -> None:
        """Once everything that was submitted is over, and the loop has heard of it."""
        await asyncio.wrap_future(self.compiling.submit(lambda: None))


@pytest.fixture
async def rig(compiler: FakeCompiler) -> AsyncIterator[Rig]:
    rig = Rig(compiler)
    yield rig
    compiler.gate.set()
    rig.compiling.shutdown()
    rig.looking.shutdown()


async def _blocked(rig: Rig, compiler: FakeCompiler, form: Form = A) -> asyncio.Task[Constraint | None]:
    """Somebody whose form is being compiled."""
    compiler.gate.clear()
    first = asyncio.create_task(rig.ask(form))
    await asyncio.to_thread(compiler.begun.wait)
    return first


async def test_a_form_is_compiled_on_the_thread_for_it_and_on_no_other(rig: Rig, compiler: FakeCompiler) -> None:
    """Neither on the loop's nor on the engine's."""
    constraint = await rig.ask(A)
    assert constraint is not None
    assert await rig.ask(A) is constraint
    assert compiler.compiled == [A]
    assert {name.rpartition("_")[0] for name in compiler.threads} == {"forms"}


async def test_a_known_form_waits_for_nobody(rig: Rig, compiler: FakeCompiler) -> None:
    """However long another takes."""
    known = await rig.ask(B)
    compiler.begun.clear()
    first = await _blocked(rig, compiler)
    assert await rig.ask(B) is known
    compiler.gate.set()
    assert await first is not None


async def test_the_queue_is_bounded_and_empties(rig: Rig, compiler: FakeCompiler) -> None:
    """Whoever finds it full is told to come again; who leaves makes room."""
    first = await _blocked(rig, compiler)
    second = asyncio.create_task(rig.ask(B))
    await rig.queue_is(2)
    with pytest.raises(WorkerError) as caught:
        await rig.ask(C)
    assert caught.value.code == Code.QUEUE_FULL
    assert await rig.ask(C, promised=False) is None
    second.cancel()
    await asyncio.wait([second])
    await rig.queue_is(1)
    third = asyncio.create_task(rig.ask(C))
    await rig.queue_is(2)
    compiler.gate.set()
    assert await first is not None
    assert await third is not None
    await rig.settled()
    assert compiler.compiled == [A, C]


async def _others(rig: Rig, form: Form) -> list[asyncio.Task[Constraint | None]]:
    """More than the queue holds, who want the form that is being compiled and wait for it."""
    others = [asyncio.create_task(rig.ask(form)) for _ in range(5)]
    await rig.looked()
    return others


async def test_a_form_that_many_want_at_once_is_compiled_once(rig: Rig, compiler: FakeCompiler) -> None:
    """None of them is told that the queue is full: only forms are counted."""
    first = await _blocked(rig, compiler)
    others = await _others(rig, A)
    assert rig.queue.waiting == 1
    compiler.gate.set()
    assert await asyncio.gather(*others) == [await first] * 5
    assert compiler.compiled == [A]


async def test_a_refusal_is_told_to_all_who_wait_for_it(rig: Rig, compiler: FakeCompiler) -> None:
    first = await _blocked(rig, compiler, BAD)
    others = await _others(rig, BAD)
    compiler.gate.set()
    told = await asyncio.gather(first, *others, return_exceptions=True)
    assert [type(error) for error in told] == [BadRequestError] * 6
    assert compiler.compiled == [BAD]


async def test_what_is_not_shared_is_compiled_for_everybody(rig: Rig, compiler: FakeCompiler) -> None:
    """One after the other, and not beyond what the queue holds."""
    first = await _blocked(rig, compiler, WORN_OUT)
    others = await _others(rig, WORN_OUT)
    compiler.gate.set()
    found = await asyncio.gather(first, *others)
    assert len(set(map(id, found))) == 6
    assert compiler.compiled == [WORN_OUT] * 6


async def test_who_waits_looks_for_a_form_no_more_often_than_it_is_compiled(rig: Rig, compiler: FakeCompiler) -> None:
    """A look takes the time of writing down the form, and each of them would look after each of them."""
    first = await _blocked(rig, compiler, WORN_OUT)
    others = await _others(rig, WORN_OUT)
    compiler.gate.set()
    await asyncio.gather(first, *others)
    assert compiler.looked == 6 + len(compiler.compiled)


async def test_who_leaves_takes_nobodys_form_along(rig: Rig, compiler: FakeCompiler) -> None:
    """Neither one whose form waits nor one whose form is being compiled."""
    first = await _blocked(rig, compiler)
    second = asyncio.create_task(rig.ask(B))
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


async def test_who_joined_a_form_keeps_its_place_when_the_first_leaves(rig: Rig, compiler: FakeCompiler) -> None:
    """Behind it are forms that were asked for later."""
    first = await _blocked(rig, compiler)
    impatient = asyncio.create_task(rig.ask(B))
    await rig.queue_is(2)
    others = await _others(rig, B)
    rig.compiling.submit(lambda: compiler.compiled.append(C))
    impatient.cancel()
    await asyncio.wait([impatient])
    compiler.gate.set()
    await asyncio.gather(first, *others)
    await rig.settled()
    assert compiler.compiled == [A, B, C]


async def test_a_form_is_compiled_for_those_whose_clients_stayed(rig: Rig, compiler: FakeCompiler) -> None:
    """Also where whoever asked first left; it is given up once all did."""
    first = await _blocked(rig, compiler)
    gone = [False, False]
    wishes = [
        rig.queue.constraint(B, "f", promised=True, deadline=None, gone=lambda number=number: gone[number])
        for number in range(2)
    ]
    asked = [asyncio.create_task(wish) for wish in wishes]
    await rig.queue_is(2)
    await rig.looked()
    gone[0] = True
    compiler.gate.set()
    await first
    assert await asked[0] is await asked[1]
    assert compiler.compiled == [A, B]


async def test_who_asks_as_a_form_is_given_up_has_it_compiled(rig: Rig, compiler: FakeCompiler) -> None:
    """Nothing was compiled because all before had left; that is no answer to who came since."""
    loop = asyncio.get_running_loop()
    late: list[asyncio.Task[Constraint | None]] = []

    async def join() -> None:
        late.append(asyncio.create_task(rig.ask(B)))
        await rig.looked()

    def gone() -> bool:
        """Asked on the thread that is about to compile."""
        if not late:
            asyncio.run_coroutine_threadsafe(join(), loop).result()
        return True

    with pytest.raises(GoneError):
        await rig.queue.constraint(B, "f", promised=True, deadline=None, gone=gone)
    assert await late[0] is not None
    assert compiler.compiled == [B]


async def test_nobody_waits_beyond_the_deadline(rig: Rig, compiler: FakeCompiler) -> None:
    """Neither for others' forms nor where it has passed; a form that only helps is left out."""
    first = await _blocked(rig, compiler)
    for deadline in (99.0, 100.01):
        with pytest.raises(WorkerError) as caught:
            await rig.ask(B, deadline=deadline)
        assert caught.value.code == Code.DEADLINE_EXCEEDED
        assert await rig.ask(B, promised=False, deadline=deadline) is None
    compiler.gate.set()
    await first
    await rig.settled()
    assert compiler.compiled == [A]


async def test_a_form_that_only_helps_is_not_waited_for(rig: Rig, compiler: FakeCompiler) -> None:
    """The answer goes on without its mask, and so it does where the form cannot be enforced."""
    first = await _blocked(rig, compiler)
    assert await rig.ask(B, promised=False) is None
    compiler.gate.set()
    assert await first is not None
    assert await rig.ask(BAD, promised=False) is None


async def test_a_form_that_takes_too_long_is_refused_for_now(compiler: FakeCompiler) -> None:
    """With another code than that of a deadline: it was the caller's wish that passed, or ours."""
    with ThreadPoolExecutor(1) as looking, ThreadPoolExecutor(1) as compiling:
        compiler.gate.clear()
        queue = FormQueue(compiler, looking, compiling, seconds=0.01)
        with pytest.raises(WorkerError) as caught:
            await queue.constraint(A, "f", promised=True, deadline=None, gone=lambda: False)
        assert caught.value.code == Code.QUEUE_FULL
        assert caught.value.retry_after
        compiler.gate.set()


async def test_nothing_is_compiled_for_a_client_who_left(rig: Rig, compiler: FakeCompiler) -> None:
    """While the form waited."""
    first = await _blocked(rig, compiler)
    second = asyncio.create_task(rig.ask(B))
    await rig.queue_is(2)
    rig.gone = True
    compiler.gate.set()
    await first
    with pytest.raises(GoneError):
        await second
    assert compiler.compiled == [A]


async def test_what_cannot_be_enforced_is_the_callers_and_may_go_elsewhere(rig: Rig) -> None:
    """As a parameter that is not supported here."""
    with pytest.raises(BadRequestError) as caught:
        await rig.ask(BAD)
    assert caught.value.code == Code.UNSUPPORTED_PARAMETER
    assert caught.value.param == "f"


async def test_the_app_asks_for_the_form_of_the_request(rig: Rig, compiler: FakeCompiler) -> None:
    """With its deadline and its client; without a form, or a model that generates, there is nothing to ask for."""
    nothing: Any = None
    ticket: Ticket[Any] = Ticket(asyncio.get_running_loop())
    app = App(nothing, nothing, nothing, None, None, rig.looking, compiler=compiler, compiling=rig.compiling)
    assert await app._compiled(Shape(), ticket, None) is None
    assert await app._compiled(Shape(form=A, param="f"), ticket, None) is not None
    with pytest.raises(WorkerError) as caught:
        await app._compiled(Shape(form=B, param="f"), ticket, time.monotonic())
    assert caught.value.code == Code.DEADLINE_EXCEEDED
    assert await app._compiled(Shape(form=B, param="f", promised=False), ticket, time.monotonic()) is None
    ticket.leave()
    with pytest.raises(GoneError):
        await app._compiled(Shape(form=B, param="f"), ticket, None)
    assert compiler.compiled == [A]
    assert await App(nothing, nothing, nothing, None, None, rig.looking)._compiled(Shape(form=A), ticket, None) is None
