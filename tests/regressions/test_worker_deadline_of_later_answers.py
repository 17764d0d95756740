"""Requests with more answers than the model has slots were ended in the midst of being answered.

The deadline for a first token was held against every answer that had not begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from headgate.shared.parameters import Sampling
from inference.protocol import Code
from inference.worker.answers.generation import Output
from inference.worker.engine.engine import Engine
from inference.worker.engine.engine_work import Work
from inference.worker.engine.outbox import Delivery
from inference.worker.engine.output_tickets import Ticket
from inference.worker.steps import Limits
from tests.rigs.fake_backend import ByteVocabulary, FakeBackend, SamplerShop

DEADLINE = 5.0
STEP_SECONDS = 1.0


def deliver(batch: list[Delivery]) -> None:
    for ticket, output in batch:
        ticket.put(output)


class Bench:
    """An engine whose turns take a second each of a clock that is set by hand; two slots."""

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
            self.now += STEP_SECONDS


async def ends(ticket: Ticket[Output]) -> dict[int, str | Code | None]:
    outputs = await ticket.take(1)
    return {
        output.choice: output.error.code if output.error else output.finish
        for output in outputs
        if output.error or output.finish
    }


@pytest.mark.parametrize("asked", [{"n": 6}, {"prompts": [[97 + n] for n in range(6)]}], ids=["n", "prompts"])
async def test_who_has_begun_may_take_as_long_as_it_takes(asked: Mapping[str, object]) -> None:
    bench = Bench()
    ticket = bench.ask(**asked)
    bench.run()
    assert bench.now > 3 * DEADLINE
    assert await ends(ticket) == dict.fromkeys(range(6), "stop")


async def test_a_request_that_has_not_begun_is_late_with_all_its_answers() -> None:
    bench = Bench()
    first = bench.ask(n=2)
    late = bench.ask(n=3)
    bench.run()
    assert await ends(first) == dict.fromkeys(range(2), "stop")
    assert await ends(late) == dict.fromkeys(range(3), Code.DEADLINE_EXCEEDED)
