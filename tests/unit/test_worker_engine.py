"""The engine with a fake backend: failed steps, samplers, parsers and masks, aborts and stops."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from headgate.shared.parameters import Sampling
from inference.protocol import Code
from inference.worker.answers.generation import Output
from inference.worker.answers.structured_answer import Reading
from inference.worker.backend import Constraint, Decode, Mask, TokenSampler
from inference.worker.dialects.answer_parts import CallArguments, CallBegin, Content, Reasoning
from inference.worker.engine.engine import PROGRESS_SECONDS, Engine
from inference.worker.engine.engine_thread import FATAL_FAILURES
from inference.worker.engine.engine_work import Work
from inference.worker.engine.output_tickets import OutputDispatcher, Ticket
from inference.worker.sampling import ConstrainedSampler
from inference.worker.steps import Limits
from inference.worker.worker_errors import ConstraintError, WorkerError
from tests.rigs.fake_backend import ByteVocabulary, FakeBackend, SamplerShop
from tests.rigs.fake_dialect import MarkParser

LIMITS = Limits(slots=4, context=100, batch=32, queue=4)
GONE = WorkerError(Code.MODEL_LOADING, "the end")


@dataclass
class Bench:
    """An engine on a fake backend, and its fatal errors."""

    backend: FakeBackend
    engine: Engine
    samplers: SamplerShop
    fatal: list[str]

    def ask(self, prompt: bytes = b"hi", **changes: object) -> Ticket[Output]:
        work = Work(**{"prompts": [list(prompt)], "n": 1, "sampling": Sampling(), "max_tokens": 50, **changes})
        ticket: Ticket[Output] = Ticket(asyncio.get_running_loop())
        self.engine.submit(work, ticket)
        return ticket

    async def outcome(self, ticket: Ticket[Output], choices: int = 1) -> list[tuple[str, str | None, Code | None]]:
        """Text, finish and error of each choice; nothing may follow its end."""
        texts = [""] * choices
        ends: dict[int, tuple[str | None, Code | None]] = {}
        while len(ends) < choices:
            outputs = await ticket.take(10)
            assert outputs, "no outputs within 10 s"
            for output in outputs:
                assert output.choice not in ends, "an output after the end"
                texts[output.choice] += output.text
                texts[output.choice] += "".join(part.text for part in output.parts if isinstance(part, Content))
                if output.error or output.finish:
                    ends[output.choice] = (output.finish, output.error.code if output.error else None)
        return [(texts[n], *ends[n]) for n in range(choices)]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    backend, samplers, fatal = FakeBackend(), SamplerShop(), []
    engine = Engine(
        backend, ByteVocabulary(), samplers, LIMITS, OutputDispatcher(asyncio.get_running_loop()).deliver, fatal.append
    )
    engine.start()
    yield Bench(backend, engine, samplers, fatal)
    if backend.gate is not None:
        backend.gate.release(1000)
    assert await asyncio.to_thread(engine.stop, GONE)
    assert [sampler.closed for sampler in samplers.made] == [1] * len(samplers.made), "samplers leaked"


async def test_request_ends_with_its_text_and_finish_reason(bench: Bench) -> None:
    assert await bench.outcome(bench.ask()) == [("abcdefgh", "stop", None)]
    assert await bench.outcome(bench.ask(max_tokens=3)) == [("abc", "length", None)]
    assert await bench.outcome(bench.ask(stops=("ef",))) == [("abcd", "stop", None)]


async def test_requests_are_computed_together(bench: Bench) -> None:
    """Four requests together need hardly more steps than one."""
    bench.backend.gate = threading.Semaphore(0)
    tickets = [bench.ask(bytes([65 + n])) for n in range(4)]
    bench.backend.gate.release(1000)
    for ticket in tickets:
        assert await bench.outcome(ticket) == [("abcdefgh", "stop", None)]
    assert max(len(batch) for batch in bench.backend.batches) == 4


async def test_choices_share_one_prompt(bench: Bench) -> None:
    ticket = bench.ask(b"x" * 20, n=3)
    assert await bench.outcome(ticket, 3) == [("abcdefgh", "stop", None)] * 3
    computed = sum(count for batch in bench.backend.batches for _slot, _start, count in batch)
    assert computed == 20 + 2 + 3 * 8


@pytest.mark.parametrize("fate", [Decode.ALLOC_FAILED, Decode.COMPUTE_FAILED, Decode.BAD_BATCH, Decode.ABORTED])
async def test_failed_step_ends_its_requests_and_the_engine_continues(bench: Bench, fate: Decode) -> None:
    bench.backend.fates = deque([Decode.OK, fate])
    [(_, finish, code)] = await bench.outcome(bench.ask())
    assert (finish, code) == (None, Code.MODEL_FAILED)
    assert await bench.outcome(bench.ask()) == [("abcdefgh", "stop", None)]
    assert bench.fatal == []


@pytest.mark.parametrize("error", [RuntimeError("surprise"), BaseException("a panic of a Rust library")])
async def test_exception_in_a_step_is_a_failed_step(bench: Bench, error: BaseException) -> None:
    bench.backend.fates = deque([error])
    [(_, _, code)] = await bench.outcome(bench.ask())
    assert code is Code.MODEL_FAILED
    assert bench.engine.counters.step_started is None, "an ended step must not look like a hang"
    assert await bench.outcome(bench.ask()) == [("abcdefgh", "stop", None)]


async def test_consecutive_failed_steps_end_the_worker(bench: Bench) -> None:
    """Waiting requests get the error too."""
    bench.backend.fates = deque([Decode.COMPUTE_FAILED] * FATAL_FAILURES)
    for _ in range(FATAL_FAILURES):
        [(_, _, code)] = await bench.outcome(bench.ask())
        assert code is Code.MODEL_FAILED
    assert await asyncio.to_thread(bench.engine.stop, GONE)
    assert len(bench.fatal) == 1


async def test_step_without_room_is_repeated_with_fewer_jobs(bench: Bench) -> None:
    """The youngest request waits and continues later."""
    bench.backend.fates = deque([Decode.OK, Decode.OK, Decode.NO_ROOM, Decode.OK])
    first, second = bench.ask(b"one"), bench.ask(b"two")
    assert await bench.outcome(first) == [("abcdefgh", "stop", None)]
    assert await bench.outcome(second) == [("abcdefgh", "stop", None)]


async def test_request_that_does_not_fit_even_alone_ends_with_an_error(bench: Bench) -> None:
    bench.backend.fates = deque([Decode.NO_ROOM] * 3)
    [(_, _, code)] = await bench.outcome(bench.ask())
    assert code is Code.MODEL_FAILED


async def test_failing_sampler_ends_only_its_request(bench: Bench) -> None:
    good = bench.ask(b"good")
    bad = bench.ask(b"bad", sampling=Sampling(seed=666))
    assert (await bench.outcome(bad))[0][1:] == (None, Code.MODEL_FAILED)
    assert await bench.outcome(good) == [("abcdefgh", "stop", None)]


async def test_failing_sampler_factory_ends_only_its_request(bench: Bench) -> None:
    bad = bench.ask(b"bad", sampling=Sampling(seed=667))
    assert (await bench.outcome(bad))[0][1:] == (None, Code.MODEL_FAILED)
    assert await bench.outcome(bench.ask()) == [("abcdefgh", "stop", None)]


async def test_constraint_error_at_the_start_keeps_its_own_code(bench: Bench) -> None:
    """As in the middle of an answer."""

    class Unstartable:
        def start(self) -> Mask:
            raise ConstraintError("the grammar became too complex for its limits")

    output = (await bench.ask(b"bad", constraint=Unstartable()).take(10))[0]
    assert output.error is not None
    message = "the grammar became too complex for its limits"
    assert (output.error.code, output.error.message) == (Code.INVALID_REQUEST, message)
    assert await bench.outcome(bench.ask()) == [("abcdefgh", "stop", None)]


async def test_aborted_request_frees_its_slot_within_one_step(bench: Bench) -> None:
    bench.backend.gate = threading.Semaphore(0)
    ticket = bench.ask(max_tokens=90)
    await asyncio.to_thread(bench.backend.entered.wait, 5)
    bench.engine.abort(ticket)
    bench.backend.gate.release(1)
    follower = bench.ask(b"next")
    bench.backend.gate.release(1000)
    assert await bench.outcome(follower) == [("abcdefgh", "stop", None)]
    assert len(bench.backend.batches[0]) == 1
    assert all(len(batch) == 1 for batch in bench.backend.batches), "the aborted request was computed further"


async def test_full_queue_rejects_at_once(bench: Bench) -> None:
    bench.backend.gate = threading.Semaphore(0)
    tickets = [bench.ask(bytes([65 + n])) for n in range(8)]
    refused = bench.ask(b"late")
    bench.backend.gate.release(1000)
    assert await bench.outcome(refused) == [("", None, Code.QUEUE_FULL)]
    for ticket in tickets:
        assert await bench.outcome(ticket) == [("abcdefgh", "stop", None)]


async def test_deadline_ends_a_request_that_has_not_started(bench: Bench) -> None:
    ticket = bench.ask(deadline=bench.engine.counters.clock() - 1)
    assert await bench.outcome(ticket) == [("", None, Code.DEADLINE_EXCEEDED)]


async def test_stop_ends_all_requests_with_its_reason(bench: Bench) -> None:
    bench.backend.gate = threading.Semaphore(0)
    tickets = [bench.ask(bytes([65 + n])) for n in range(6)]
    await asyncio.to_thread(bench.backend.entered.wait, 5)
    bench.engine.stop(GONE, 0.0)
    bench.backend.gate.release(1000)
    for ticket in tickets:
        assert (await bench.outcome(ticket))[0][2] is Code.MODEL_LOADING


async def test_counters_contain_computed_tokens(bench: Bench) -> None:
    await bench.outcome(bench.ask(b"hello"))
    await bench.outcome(bench.ask(b"hello!"))
    assert await asyncio.to_thread(bench.engine.stop, GONE)
    beat = bench.engine.counters.beat()
    assert (beat.active, beat.queued, beat.step_seconds) == (0, 0, None)
    assert beat.prompt_tokens == 5 + 1, "the second prompt reuses the first"
    assert beat.generated_tokens == 2 * 9
    assert beat.largest_step == 5


async def test_used_cells_are_counted_periodically(bench: Bench) -> None:
    """And at the end."""
    now = [0.0]
    engine = Engine(bench.backend, ByteVocabulary(), bench.samplers, LIMITS, len, bench.fatal.append, lambda: now[0])
    work = Work(prompts=[list(b"hi")], n=1, sampling=Sampling(), max_tokens=3)
    engine.submit(work, Ticket(asyncio.get_running_loop()))
    engine._iterate()
    now[0] = PROGRESS_SECONDS
    engine._iterate()
    assert (engine.counters.cells_used, engine.counters.cells_retained) == (2, 0)
    engine._iterate()
    assert engine.counters.cells_used == 2
    engine._iterate()
    assert (engine.counters.cells_used, engine.counters.cells_retained) == (0, 4)


@dataclass
class FakeMask:
    """Allows everything and fails at the token `fails_at`."""

    fails_at: int
    seen: list[int] = field(default_factory=list)

    def apply(self, logits: np.ndarray) -> None:
        pass

    def accept(self, token: int) -> None:
        self.seen.append(token)
        if token == self.fails_at:
            raise ConstraintError("the form is lost")


@dataclass
class FakeConstraint:
    """Starts masks, or fails to."""

    fails_at: int = -1
    starts: bool = True
    made: list[FakeMask] = field(default_factory=list)

    def start(self) -> Mask:
        if not self.starts:
            raise ValueError("it cannot be started")
        self.made.append(FakeMask(self.fails_at))
        return self.made[-1]


@pytest.fixture
async def shaped() -> AsyncIterator[Bench]:
    backend, samplers, fatal = FakeBackend(), SamplerShop(b"(a)b[f:1]"), []

    def make(sampling: Sampling, choice: int, constraint: Constraint | None) -> TokenSampler:
        if constraint is None:
            return samplers(sampling, choice)
        mask = constraint.start()
        return ConstrainedSampler(samplers(sampling, choice), backend, mask)

    engine = Engine(
        backend, ByteVocabulary(), make, LIMITS, OutputDispatcher(asyncio.get_running_loop()).deliver, fatal.append
    )
    engine.start()
    yield Bench(backend, engine, samplers, fatal)
    assert await asyncio.to_thread(engine.stop, GONE)
    assert [sampler.closed for sampler in samplers.made] == [1] * len(samplers.made), "samplers leaked"
    assert fatal == []


def reading() -> Reading:
    return Reading(MarkParser, lambda: "call_1")


def broken() -> MarkParser:
    raise ValueError("no such parser")


async def test_each_choice_of_an_answer_has_its_own_parser(shaped: Bench) -> None:
    ticket = shaped.ask(n=2, reading=reading())
    outputs: list[Output] = []
    while sum(output.finish is not None for output in outputs) < 2:
        outputs += await ticket.take(10)
    for choice in (0, 1):
        own = [output for output in outputs if output.choice == choice]
        assert [part for output in own for part in output.parts] == [
            Reasoning("a"), Content("b"), CallBegin(0, "f", "call_1"), CallArguments(0, "1")
        ]  # fmt: skip
        assert (own[-1].finish, own[-1].reasoning_tokens) == ("tool_calls", 3)


async def test_failing_parser_ends_only_its_request(shaped: Bench) -> None:
    shaped.samplers.say = b"ab!c"
    bad, good = shaped.ask(b"bad", reading=reading()), shaped.ask(b"good")
    assert (await shaped.outcome(bad))[0] == ("ab", None, Code.MODEL_FAILED)
    assert await shaped.outcome(good) == [("ab!c", "stop", None)]


async def test_failing_start_of_a_parser_or_mask_ends_only_its_request(shaped: Bench) -> None:
    for changes in ({"reading": Reading(broken, str)}, {"constraint": FakeConstraint(starts=False)}):
        bad, good = shaped.ask(b"bad", n=2, **changes), shaped.ask(b"good")
        assert (await shaped.outcome(bad))[0][1:] == (None, Code.MODEL_FAILED)
        assert await shaped.outcome(good) == [("(a)b[f:1]", "stop", None)]


async def test_constraint_error_message_reaches_the_request(shaped: Bench) -> None:
    """It is no failure of the model; other requests continue."""
    lost, kept = FakeConstraint(fails_at=ord("b")), FakeConstraint()
    bad, good = shaped.ask(b"bad", constraint=lost), shaped.ask(b"good", constraint=kept)
    assert (await shaped.outcome(bad))[0] == ("(a)", None, Code.INVALID_REQUEST)
    assert await shaped.outcome(good) == [("(a)b[f:1]", "stop", None)]
    assert bytes(kept.made[0].seen[:-1]) == b"(a)b[f:1]"


async def test_each_choice_has_its_own_mask(shaped: Bench) -> None:
    constraint = FakeConstraint()
    assert await shaped.outcome(shaped.ask(n=3, constraint=constraint), 3) == [("(a)b[f:1]", "stop", None)] * 3
    assert len(constraint.made) == 3
