"""The engine with parsers and constraints: each answer has its own, and a failure ends one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from headgate.shared.parameters import Sampling
from inference.protocol import Code
from inference.worker.answers.generation import Output
from inference.worker.answers.structured_answer import Reading
from inference.worker.backend import Constraint, Mask, TokenSampler
from inference.worker.dialects.answer_parts import CallArguments, CallBegin, Content, Reasoning
from inference.worker.engine.engine import Engine
from inference.worker.engine.engine_work import Work
from inference.worker.engine.output_tickets import OutputDispatcher
from inference.worker.sampling.constrained_sampler import ConstrainedSampler
from inference.worker.worker_errors import ConstraintError
from tests.rigs.fake_backend import ByteVocabulary, FakeBackend, SamplerShop
from tests.rigs.fake_dialect import MarkParser
from tests.unit.test_worker_engine import GONE, LIMITS, Bench


@dataclass
class FakeMask:
    """Allows everything and fails at the token `fails_at`."""

    fails_at: int
    seen: list[int] = field(default_factory=list)

    def apply(self, logits: np.ndarray) -> None:
        """Leaves all as it is."""

    def accept(self, token: int) -> None:
        """Remembers."""
        self.seen.append(token)
        if token == self.fails_at:
            raise ConstraintError("the form is lost")


@dataclass
class FakeConstraint:
    """Starts masks, or cannot."""

    fails_at: int = -1
    starts: bool = True
    made: list[FakeMask] = field(default_factory=list)

    def start(self) -> Mask:
        """A mask of its own for each choice."""
        if not self.starts:
            raise ValueError("it cannot be started")
        self.made.append(FakeMask(self.fails_at))
        return self.made[-1]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    backend, samplers, fatal = FakeBackend(), SamplerShop(b"(a)b[f:1]"), []

    def make(sampling: Sampling, choice: int, most: int, constraint: Constraint | None) -> TokenSampler:
        if constraint is None:
            return samplers(sampling, choice, most)
        mask = constraint.start()
        return ConstrainedSampler(samplers(sampling, choice, most), backend, mask)

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


async def test_each_choice_has_its_own_parser(bench: Bench) -> None:
    ticket = bench.ask(n=2, reading=reading())
    outputs: list[Output] = []
    while sum(output.finish is not None for output in outputs) < 2:
        outputs += await ticket.take(10)
    for choice in (0, 1):
        own = [output for output in outputs if output.choice == choice]
        assert [part for output in own for part in output.parts] == [
            Reasoning("a"), Content("b"), CallBegin(0, "f", "call_1"), CallArguments(0, "1")
        ]  # fmt: skip
        assert (own[-1].finish, own[-1].reasoning_tokens) == ("tool_calls", 3)


async def test_failing_parser_ends_only_its_request(bench: Bench) -> None:
    bench.samplers.say = b"ab!c"
    bad, good = bench.ask(b"bad", reading=reading()), bench.ask(b"good")
    assert (await bench.outcome(bad))[0] == ("ab", None, Code.MODEL_FAILED)
    assert await bench.outcome(good) == [("ab!c", "stop", None)]


async def test_a_parser_or_a_mask_that_cannot_be_made_ends_only_its_request(bench: Bench) -> None:
    for changes in ({"reading": Reading(broken, str)}, {"constraint": FakeConstraint(starts=False)}):
        bad, good = bench.ask(b"bad", n=2, **changes), bench.ask(b"good")
        assert (await bench.outcome(bad))[0][1:] == (None, Code.MODEL_FAILED)
        assert await bench.outcome(good) == [("(a)b[f:1]", "stop", None)]


async def test_constraint_error_message_reaches_the_request(bench: Bench) -> None:
    """It is no failure of the model, and the neighbor goes on."""
    lost, kept = FakeConstraint(fails_at=ord("b")), FakeConstraint()
    bad, good = bench.ask(b"bad", constraint=lost), bench.ask(b"good", constraint=kept)
    assert (await bench.outcome(bad))[0] == ("(a)", None, Code.INVALID_REQUEST)
    assert await bench.outcome(good) == [("(a)b[f:1]", "stop", None)]
    assert bytes(kept.made[0].seen[:-1]) == b"(a)b[f:1]"


async def test_each_choice_has_its_own_mask(bench: Bench) -> None:
    constraint = FakeConstraint()
    assert await bench.outcome(bench.ask(n=3, constraint=constraint), 3) == [("(a)b[f:1]", "stop", None)] * 3
    assert len(constraint.made) == 3


def test_work_has_no_reading_or_constraint_by_default() -> None:
    plain = Work(prompts=[[1]], n=1, sampling=Sampling(), max_tokens=1)
    assert (plain.reading, plain.constraint) == (None, None)
