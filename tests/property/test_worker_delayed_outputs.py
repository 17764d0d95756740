"""Outputs that may be delayed and joined: none is lost, none is later than allowed, none follows its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.shared.parameters import Sampling
from inference.worker.answers.generation import Output
from inference.worker.backend import BatchRow, Decode
from inference.worker.dialects.answer_parts import CallArguments, CallBegin, Content, Part, Reasoning, joined
from inference.worker.engine.engine import Engine
from inference.worker.engine.engine_work import Work
from inference.worker.engine.output_tickets import Delivery, Outbox
from inference.worker.steps import Limits
from tests.rigs.engine_rig import Mailbox
from tests.rigs.fake_backend import ByteVocabulary, FakeBackend, FakeSampler

SAY = bytes(range(97, 123)) * 3
MILLISECOND = 0.001


@dataclass
class Timed(FakeBackend):
    """Steps advance the clock of the bench: a fixed time, and more with prompts."""

    now: float = 0.0
    step_seconds: float = MILLISECOND
    prefill_seconds: float = 0.0

    def decode(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
        self.now += self.step_seconds + (self.prefill_seconds if any(len(row.tokens) > 1 for row in rows) else 0.0)
        return super().decode(rows)


@dataclass
class TimedSampler(FakeSampler):
    """Records when it drew."""

    clock: Callable[[], float] = lambda: 0.0
    times: list[float] = field(default_factory=list)

    def sample(self, index: int) -> int:
        self.times.append(self.clock())
        return super().sample(index)


@dataclass
class Bench:
    """An engine whose turns the test runs. `received` has time, ticket and output; `samplers` are in the order of
    their choices.
    """

    backend: Timed = field(default_factory=Timed)
    received: list[tuple[float, Any, Output]] = field(default_factory=list)
    samplers: list[TimedSampler] = field(default_factory=list)

    def __post_init__(self) -> None:
        def sampler(*_what: object) -> TimedSampler:
            self.samplers.append(TimedSampler(SAY, clock=lambda: self.backend.now))
            return self.samplers[-1]

        self.engine = Engine(
            self.backend,
            ByteVocabulary(),
            sampler,
            Limits(slots=4, context=200, batch=32, queue=8),
            lambda batch: self.received.extend((self.backend.now, *delivery) for delivery in batch),
            lambda message: pytest.fail(message),
            clock=lambda: self.backend.now,
        )

    def ask(self, **changes: Any) -> Mailbox:
        ticket = Mailbox()
        work = {"prompts": [list(b"hello")], "n": 1, "sampling": Sampling(), "max_tokens": 60}
        work["max_delay_seconds"] = 0.01
        self.engine.submit(Work(**{**work, **changes}), ticket)  # type: ignore[arg-type]
        return ticket

    def run(self, turns: int = 1000) -> None:
        while turns and self.engine._iterate():
            turns -= 1

    def of(self, ticket: Mailbox, choice: int = 0) -> list[tuple[float, Output]]:
        return [(at, output) for at, owner, output in self.received if owner is ticket and output.choice == choice]


def test_text_within_the_delay_is_joined() -> None:
    bench = Bench()
    ticket = bench.ask()
    bench.run()
    outputs = [output for _at, output in bench.of(ticket)]
    assert "".join(output.text for output in outputs) == SAY[:60].decode()
    assert outputs[0].text == "a", "the first token is sent at once"
    assert {len(output.text) for output in outputs[1:-1]} == {10}
    assert [output.tokens for output in outputs] == [1, 11, 21, 31, 41, 51, 60]
    assert [output.finish for output in outputs] == [None] * 6 + ["length"]


@pytest.mark.parametrize("changes", [{"max_delay_seconds": 0.0}, {"logprobs": 2}])
def test_each_token_is_sent_alone_without_a_delay_or_with_log_probabilities(changes: dict[str, Any]) -> None:
    bench = Bench()
    ticket = bench.ask(**changes)
    bench.run()
    assert [output.text for _at, output in bench.of(ticket)] == [chr(byte) for byte in SAY[:60]]


def test_first_output_of_each_choice_is_sent_at_once() -> None:
    bench = Bench()
    ticket = bench.ask(n=3)
    bench.run()
    assert [bench.of(ticket, choice)[0][1].text for choice in range(3)] == ["a"] * 3


def test_reader_of_log_probabilities_is_not_counted_as_lagging() -> None:
    """Text whose scores wait for their token, because of a possible stop string, is counted once."""
    bench = Bench()
    ticket = bench.ask(logprobs=2, stops=("cdx", "fgy"), max_tokens=70)
    bench.run()
    assert ticket.sent <= len(bench.of(ticket))


def test_waiting_request_does_not_prevent_joining() -> None:
    bench = Bench()
    bench.engine.limit(1)
    first, second = bench.ask(), bench.ask()
    bench.run()
    assert len(bench.of(first)) == len(bench.of(second)) == 7


def test_dropped_output_does_not_release_other_outputs_early() -> None:
    outbox = Outbox()
    left, stays = Mailbox(), Mailbox()
    outbox.hold(left, Output(0, "a", 1), 1.0)  # type: ignore[arg-type]
    outbox.hold(stays, Output(0, "b", 1), 9.0)  # type: ignore[arg-type]
    outbox.drop(left)  # type: ignore[arg-type]
    outbox.release(2.0)
    assert outbox.is_waiting
    outbox.release(10.0)
    assert not outbox.is_waiting


def test_undelivered_outputs_are_kept() -> None:
    outbox, got = Outbox(), []  # type: ignore[var-annotated]
    outbox.put(Mailbox(), Output(0, "a", 1))  # type: ignore[arg-type]

    def fail(_batch: list[Delivery]) -> None:
        raise OSError

    with pytest.raises(OSError):
        outbox.deliver(fail)
    outbox.deliver(got.extend)
    outbox.deliver(fail)
    assert [output.text for _ticket, output in got] == ["a"]


def test_steps_longer_than_the_delay_hold_nothing_back() -> None:
    bench = Bench(Timed(step_seconds=0.011))
    ticket = bench.ask()
    bench.run()
    assert len(bench.of(ticket)) == 60


def test_waiting_outputs_are_sent_before_a_prompt_is_read() -> None:
    """A step with a prompt may take a second."""
    bench = Bench(Timed(prefill_seconds=1.0))
    first = bench.ask()
    bench.run(turns=5)
    bench.ask(prompts=[list(b"another prompt")])
    began = bench.backend.now
    bench.run(turns=1)
    assert bench.backend.now - began > 1.0
    assert "".join(output.text for at, output in bench.of(first) if at <= began) == SAY[:5].decode()


def test_aborted_request_gets_no_waiting_output() -> None:
    bench = Bench()
    ticket, other = bench.ask(), bench.ask()
    bench.run(turns=5)
    bench.engine.abort(ticket)  # type: ignore[arg-type]
    bench.run()
    assert "".join(output.text for _at, output in bench.of(ticket)) == "a"
    assert "".join(output.text for _at, output in bench.of(other)) == SAY[:60].decode()


def test_error_follows_the_text_before_it() -> None:
    bench = Bench()
    ticket = bench.ask()
    bench.run(turns=5)
    bench.backend.fates.append(Decode.COMPUTE_FAILED)
    bench.run()
    (_, first), (_, second), (_, end) = bench.of(ticket)
    assert (first.text, second.text, end.text) == ("a", "bcde", "")
    assert second.error is None
    assert end.error is not None


def test_waiting_output_is_not_counted_as_unread() -> None:
    """A reader that takes everything is not mistaken for one that reads nothing."""
    bench = Bench()
    ticket = bench.ask()
    bench.run()
    assert ticket.sent <= len(bench.of(ticket))


@pytest.mark.unmeasured
@given(
    step=st.floats(0.0003, 0.03),
    prefill=st.floats(0.0, 0.5),
    requests=st.lists(
        st.tuples(st.integers(0, 30), st.floats(0, 0.05), st.integers(1, 3), st.integers(1, 70)), min_size=1, max_size=5
    ),
)
def test_no_output_is_lost_or_late(step: float, prefill: float, requests: list[tuple[int, float, int, int]]) -> None:
    bench = Bench(Timed(step_seconds=step, prefill_seconds=prefill))
    tickets = []
    for turns, max_delay, n, most in requests:
        tickets.append((bench.ask(max_delay_seconds=max_delay, n=n, max_tokens=most), max_delay, n, most))
        bench.run(turns)
    bench.run()
    slack = 1e-9
    samplers = list(bench.samplers)
    for ticket, max_delay, n, most in tickets:
        for choice in range(n):
            outputs = bench.of(ticket, choice)
            assert "".join(output.text for _at, output in outputs) == SAY[:most].decode()
            assert [output.finish is not None for _at, output in outputs] == [False] * (len(outputs) - 1) + [True]
            drawn = samplers.pop(0).times
            assert outputs[0][0] == drawn[0], "the first token of each choice is sent at once"
            for (_, before), (at, _output) in pairwise(outputs):
                assert at - drawn[before.tokens] <= max_delay + slack


PARTS = st.lists(
    st.one_of(
        st.builds(Content, st.text(max_size=3)),
        st.builds(Reasoning, st.text(max_size=3)),
        st.builds(CallArguments, st.integers(0, 1), st.text(max_size=3)),
        st.builds(CallBegin, st.integers(0, 1), st.sampled_from(["f", "g"])),
    ),
    max_size=6,
).map(tuple)


def _spread(parts: Sequence[Part]) -> list[tuple[object, ...]]:
    """Letter by letter, so that a continued text equals a whole one."""
    return [
        (type(part), getattr(part, "index", None), letter)
        for part in parts
        for letter in ([part.name] if isinstance(part, CallBegin) else part.text)
    ]


@given(PARTS, PARTS)
def test_joined_parts_are_equal(parts: tuple[Part, ...], more: tuple[Part, ...]) -> None:
    both = joined(parts, more)
    assert _spread(both) == _spread([*parts, *more])
    assert len(both) >= len(parts) + len(more) - 1
