"""Steps that were far too long taught nothing as long as their prompts used less than half of the budget.

On a machine that had become slow every request of middling length stalled all streams, again and again. A prompt
computed again after a preemption taught nothing either.
"""

from __future__ import annotations

import asyncio
import itertools

from headgate.shared.parameters import Sampling
from inference.worker.engine.engine import Engine
from inference.worker.engine.engine_work import Work
from inference.worker.engine.output_tickets import Ticket
from inference.worker.engine.prefill_pacing import SLOWEST, STEP_SECONDS, Pace
from inference.worker.steps import Limits
from tests.rigs.fake_backend import ByteVocabulary, FakeBackend, SamplerShop


def test_a_step_that_was_too_long_shrinks_the_budget_whatever_it_used() -> None:
    pace = Pace(2048, 2048).observe(800, 800, 10 * SLOWEST * STEP_SECONDS, STEP_SECONDS, decoding=1, prompts=1)
    assert pace.tokens == 80


async def test_the_pace_is_learned_from_every_prompt_token_that_was_computed() -> None:
    """The clock moves one second per look; the first piece of a prompt is 32 tokens and none are fewer."""
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
