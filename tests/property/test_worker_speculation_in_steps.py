"""Answers with proposals are those of one token per step: for all samplers, streams, aborts, preemptions, slow readers.

The fake model computes the same logits in any batch, so that the answers must be equal to the token.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.shared.parameters import Sampling
from inference.worker.answers.generation import Output
from inference.worker.backend import Constraint, Decode
from inference.worker.engine import engine as engine_module
from inference.worker.engine.draft_model import DraftModel
from inference.worker.engine.engine import Engine
from inference.worker.engine.engine_work import Work
from inference.worker.engine.output_tickets import Delivery
from inference.worker.engine.speculation import Speculation
from inference.worker.steps import Limits
from tests.rigs.engine_rig import Mailbox
from tests.rigs.fake_backend import END, ByteVocabulary
from tests.rigs.table_backend import LETTERS, EagerSpeculation, TableBackend, TableSampler, answer_of

PROMPTS = st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=12)
TEMPERATURES = st.sampled_from((0.0, 0.3, 1.0))


class Bench:
    """An engine on the fake model, run in this thread."""

    def __init__(self, limits: Limits, speculation: Speculation | None, *, drafts: bool = False) -> None:
        """`drafts`: a draft model with a shorter context proposes; it is often right."""
        self.draft = DraftBackend(slots=limits.slots)
        if drafts:
            source = DraftModel(
                self.draft,
                slots=limits.slots,
                context=limits.context - 5,
                batch=limits.batch,
                vocabulary=LETTERS,
                cells=limits.cells,
                clock=lambda: 0.0,
            )
            speculation = EagerSpeculation(source)
        self.backend = TableBackend(slots=limits.slots, max_outputs=limits.outputs or limits.slots)
        self.delivered: list[Delivery] = []
        self.engine = Engine(
            self.backend, ByteVocabulary(), self._sampler, limits, self.delivered.extend, print, speculation=speculation
        )

    def _sampler(self, sampling: Sampling, choice: int, _constraint: Constraint | None) -> TableSampler:
        assert sampling.seed is not None
        return TableSampler(self.backend, sampling.seed + choice, sampling.temperature)

    def ask(self, prompt: list[int], seed: int, temperature: float, most: int, **more: Any) -> Mailbox:
        ticket = Mailbox()
        sampling = Sampling(seed=seed, temperature=temperature)
        work: dict[str, Any] = {"prompts": [prompt], "n": 1, "sampling": sampling, "max_tokens": most, **more}
        self.engine.submit(Work(**work), ticket)  # type: ignore[arg-type]
        return ticket

    def run(self, tickets: list[Mailbox]) -> None:
        """Runs until all have ended; they read."""
        for _ in range(5000):
            for ticket in tickets:
                read(ticket)
            if not (self.engine._iterate() or self.engine._scheduler.has_work):
                return
        raise AssertionError("the answers do not end")

    def outputs(self, ticket: Mailbox) -> list[Output]:
        return [output for owner, output in self.delivered if owner is ticket]  # type: ignore[comparison-overlap]

    def text(self, ticket: Mailbox, choice: int = 0) -> list[int]:
        return [ord(letter) for item in self.outputs(ticket) if item.choice == choice for letter in item.text]


class DraftBackend(TableBackend):
    """A draft model whose logits sometimes differ from those of the model."""

    def logits(self, index: int) -> np.ndarray:
        """Other logits whenever the number of held tokens is a multiple of four."""
        found = super().logits(index)
        return np.roll(found, 1) if sum(map(len, self.held)) % 4 == 0 else found


def read(ticket: Mailbox) -> None:
    """Reads all outputs of a ticket."""
    ticket.read = ticket.sent
    if ticket.stalled:
        ticket.stalled = False
        ticket.on_room()  # type: ignore[operator]


LIMITS = Limits(slots=3, context=64, batch=32, queue=20, outputs=11)


@pytest.mark.unmeasured
@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            PROMPTS, st.integers(0, 99), TEMPERATURES, st.integers(1, 50), st.integers(0, 6),
            st.integers(0, 30) | st.none(),
        ),
        min_size=1,
        max_size=6,
    ),
    cells=st.sampled_from((0, 64, 70, 100)),
    outputs=st.sampled_from((3, 5, 19)),
    full=st.lists(st.integers(0, 60), max_size=3),
    unread=st.sampled_from((2, 5, 1000)),
    drafts=st.booleans(),
    broken=st.lists(st.sampled_from((Decode.OK, Decode.COMPUTE_FAILED)), max_size=8),
)  # fmt: skip
def test_answers_with_speculation_equal_those_of_one_token_per_step(
    requests: list[tuple[list[int], int, float, int, int, int | None]],
    cells: int,
    outputs: int,
    full: list[int],
    unread: int,
    drafts: bool,
    broken: list[Decode],
) -> None:
    """`requests`: prompt, seed, temperature, tokens, steps before it arrives, steps until it is aborted."""
    limits = Limits(slots=3, context=64, batch=32, queue=20, outputs=outputs, cells=cells, answer_cells=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "UNREAD_OUTPUTS", unread)
        bench = Bench(limits, EagerSpeculation(), drafts=drafts)
        bench.draft.fates = deque(broken)
        tickets: list[Mailbox] = []
        aborts: dict[int, Mailbox] = {}
        expected = []
        step = 0
        for prompt, seed, temperature, most, wait, abort in requests:
            for _ in range(wait):
                bench.engine._iterate()
                step += 1
                if step in full:
                    bench.backend.fates = deque([Decode.NO_ROOM])
                if step in aborts:
                    bench.engine.abort(aborts[step])  # type: ignore[arg-type]
            tickets.append(bench.ask(prompt, seed, temperature, most))
            answer = answer_of(prompt, seed, temperature, most)
            expected.append([token for token in answer if token != END])
            if abort is not None:
                aborts[step + abort] = tickets[-1]
        bench.backend.fates.clear()
        bench.run(tickets)
    for ticket, answer in zip(tickets, expected, strict=True):
        text = bench.text(ticket)
        assert text == answer[: len(text)]
        assert len(text) == len(answer) or ticket in aborts.values() or bench.outputs(ticket)[-1].error is not None
        assert sum(output.finish is not None for output in bench.outputs(ticket)) <= 1
    held = {slot.number: slot.computed for slot in bench.engine._scheduler.slots.held()}
    assert {number: len(cells) for number, cells in enumerate(bench.backend.held) if cells} == held
    assert not cells or sum(map(len, bench.draft.held)) <= cells


def test_several_tokens_are_accepted_in_a_step() -> None:
    """Fewer steps than tokens, and the same number of tokens is counted."""
    prompt = [0, 1, 2, 3, 4, 5] * 2
    for temperature, drafts in itertools.product((0.0, 0.3), (False, True)):
        bench = Bench(LIMITS, EagerSpeculation(), drafts=drafts)
        ticket = bench.ask(prompt, 7, temperature, 50)
        bench.run([ticket])
        counters = bench.engine.counters
        answer = answer_of(prompt, 7, temperature, 50)
        assert counters.generated_tokens == len(answer) == bench.outputs(ticket)[-1].tokens
        assert counters.steps < len(answer)
        assert counters.proposed_tokens >= counters.accepted_tokens >= len(answer) - counters.steps > 0
        beat = counters.beat()
        assert (beat.proposed_tokens, beat.accepted_tokens) == (counters.proposed_tokens, counters.accepted_tokens)


@pytest.mark.parametrize("more", [{"stops": ("\x02\x03",)}, {"logprobs": 2}, {"n": 3}, {"score_prompt": True}])
def test_stops_logprobs_choices_and_scores_are_the_same_with_proposals(more: dict[str, Any]) -> None:
    prompt = [0, 1, 2, 3, 4, 5] * 2
    found = []
    for speculation in (None, EagerSpeculation()):
        bench = Bench(Limits(slots=3, context=80, batch=32, queue=9, outputs=19), speculation)
        ticket = bench.ask(prompt, 3, 0.3, 50, **more)
        bench.run([ticket])
        found.append([output._replace(cached=0) for output in bench.outputs(ticket)])
        assert (bench.engine.counters.accepted_tokens > 0) == (speculation is not None)
    by_choice = [sorted(outputs, key=lambda output: output.choice) for outputs in found]
    assert by_choice[0] == by_choice[1]


def test_requests_can_refuse_proposals() -> None:
    bench = Bench(LIMITS, EagerSpeculation())
    bench.run([bench.ask([0, 1, 2, 3, 4, 5] * 2, 7, 0.0, 50, speculates=False)])
    assert bench.engine.counters.proposed_tokens == 0


def test_failing_sampler_leaves_no_proposals_in_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [0, 1, 2, 3, 4, 5] * 2
    bench = Bench(LIMITS, EagerSpeculation())
    ticket = bench.ask(prompt, 7, 0.0, 50)
    draw, drawn = TableSampler.draw, [0]

    def failing(self: TableSampler, logits: Any) -> int:
        drawn[0] += 1
        if bench.engine.counters.proposed_tokens and drawn[0] % 3 == 0:
            raise RuntimeError("the sampler is broken")
        return draw(self, logits)

    monkeypatch.setattr(TableSampler, "draw", failing)
    bench.run([ticket])
    assert bench.outputs(ticket)[-1].error is not None
    (slot,) = bench.engine._scheduler.slots.held()
    assert bench.backend.held[slot.number] == list(slot.tokens)


def test_sampled_answers_have_the_token_shares_of_answers_without_proposals() -> None:
    """Each token has the same share of thousands of tokens of seeded answers."""
    prompt = [0, 1, 2, 3, 4, 5] * 2
    bench = Bench(Limits(slots=3, context=64, batch=64, queue=400, outputs=40), EagerSpeculation())
    tickets = [bench.ask(prompt, seed, 0.5, 50) for seed in range(200)]
    bench.run(tickets)
    alone = [answer_of(prompt, seed, 0.5, 50) for seed in range(10_000, 10_200)]
    firsts: list[dict[int, int]] = [{}, {}]
    texts = [[bench.text(ticket) for ticket in tickets], [[t for t in text if t != END] for text in alone]]
    for counts, answers in zip(firsts, texts, strict=True):
        for answer in answers:
            for token in answer:
                counts[token] = counts.get(token, 0) + 1
    assert bench.engine.counters.accepted_tokens > 1000
    total = [sum(counts.values()) for counts in firsts]
    for token in range(LETTERS):
        shares = [counts.get(token, 0) / whole for counts, whole in zip(firsts, total, strict=True)]
        assert shares[0] == pytest.approx(shares[1], abs=0.02)
