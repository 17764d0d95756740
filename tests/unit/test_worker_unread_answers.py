"""A request with too many unread outputs gives up its slot until they are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from headgate.shared.parameters import Sampling
from inference.protocol import Code
from inference.worker.answers.generation import Output
from inference.worker.engine.engine import UNREAD_OUTPUTS, UNREAD_SECONDS, Engine
from inference.worker.engine.engine_work import Work
from inference.worker.engine.output_tickets import Ticket
from inference.worker.steps import Limits
from tests.rigs.fake_backend import ByteVocabulary, FakeBackend, SamplerShop

TEXT = bytes(range(97, 123)) * 100
ALTERNATIVES = 1000
MOST = UNREAD_OUTPUTS // (1 + ALTERNATIVES)


@dataclass
class Bench:
    """An engine that the test drives, with a clock that the test moves."""

    now: float = 0.0
    samplers: SamplerShop = field(default_factory=lambda: SamplerShop(TEXT))

    def __post_init__(self) -> None:
        self.backend = FakeBackend()
        self.engine = Engine(
            self.backend,
            ByteVocabulary(),
            self.samplers,
            Limits(slots=2, context=4000, batch=64, queue=4),
            lambda batch: [ticket.put(output) for ticket, output in batch] and None,
            lambda _message: None,
            clock=lambda: self.now,
        )

    def ask(self, tokens: int, **changes: object) -> Ticket[Output]:
        ticket: Ticket[Output] = Ticket(asyncio.get_running_loop())
        work = Work(prompts=[list(b"hello")], n=1, sampling=Sampling(), max_tokens=tokens, logprobs=ALTERNATIVES)
        self.engine.submit(replace(work, **changes), ticket)
        return ticket

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self.engine._iterate() and not until():
            pass


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_unread_answer_is_suspended_and_continues_after_reading(bench: Bench) -> None:
    ticket = bench.ask(100)
    text = ""
    takes = 0
    finish = None
    while finish is None:
        bench.run()
        outputs = await ticket.take(1)
        assert 0 < len(outputs) <= MOST + 2
        takes += 1
        text += "".join(output.text for output in outputs)
        finish = outputs[-1].finish
    assert (text, finish) == (TEXT[:100].decode(), "length")
    assert takes == -(-100 // (MOST + 1))
    computed = sum(count for batch in bench.backend.batches for _slot, _start, count in batch)
    assert computed == 5 + 99, "its cells are retained"


async def test_unread_answer_does_not_delay_other_requests(bench: Bench) -> None:
    """It has no slot."""
    stalled = [bench.ask(200) for _ in range(2)]
    bench.run()
    other = bench.ask(60, logprobs=None)
    bench.run()
    assert (await other.take(1))[-1].finish == "length"
    assert all(ticket.stalled for ticket in stalled)


async def test_answer_that_stays_unread_ends(bench: Bench) -> None:
    """With all its choices."""
    ticket = bench.ask(200, n=2)
    bench.run()
    bench.now = UNREAD_SECONDS
    bench.engine._iterate()
    errors = [output.error.code for output in await ticket.take(1) if output.error]
    assert errors == [Code.DEADLINE_EXCEEDED] * 2
    assert [sampler.closed for sampler in bench.samplers.made] == [1, 1]
    assert not bench.engine._scheduler.queued


async def test_abort_of_a_suspended_request_removes_it(bench: Bench) -> None:
    ticket = bench.ask(200)
    bench.run()
    assert ticket.stalled
    bench.engine.abort(ticket)
    bench.run()
    bench.now = UNREAD_SECONDS
    bench.run()
    assert not bench.engine._scheduler.queued
    assert [sampler.closed for sampler in bench.samplers.made] == [1]
