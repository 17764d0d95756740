"""Proposals of a draft model: its slots follow those of the model, in pieces, and its errors harm no answer."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from headgate.shared.units import MIB
from inference.authority.handlers.queries.plan_inputs import deviation
from inference.estimate.header_formula import Parts
from inference.estimate.model_estimate import Estimate
from inference.worker.backend import Decode
from inference.worker.engine.draft_model import MAX_FAILURES, PIECE_SECONDS, DraftModel
from inference.worker.engine.prefill_pacing import MIN_STEP_TOKENS
from inference.worker.llama.draft_loading import MAX_PADDING, vocabulary_difference
from inference.worker.steps import Candidate
from inference.worker_link import Buffer, Ready
from tests.rigs.table_backend import LETTERS, TableBackend, logits_after

TEXT = [0, 1, 2, 3, 4, 5] * 30


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A draft model on the fake model."""

    def __init__(self, context: int = 1000, cells: int = 0, step_seconds: float = 0.0) -> None:
        self.clock = Clock()
        self.backend = TableBackend(slots=3)
        decode = self.backend.decode

        def timed(rows: Sequence[Any]) -> tuple[Decode, list[int]]:
            self.clock.now += step_seconds
            return decode(rows)

        self.backend.decode = timed  # type: ignore[method-assign]
        self.draft = DraftModel(
            self.backend, slots=3, context=context, batch=512, vocabulary=LETTERS, cells=cells, clock=self.clock
        )

    def propose(self, tokens: Sequence[int], most: int = 4, job: int = 1, slot: int = 0) -> list[int]:
        (found,) = self.draft.propose([Candidate(job, slot, array("i", tokens), most)])
        return list(found)

    def proposed(self, tokens: Sequence[int], most: int = 4, job: int = 1, slot: int = 0) -> list[int]:
        """The proposals once all tokens were computed."""
        for _ in range(20):
            if found := self.propose(tokens, most, job, slot):
                return found
        raise AssertionError("nothing is proposed")


def likeliest(tokens: Sequence[int], count: int) -> list[int]:
    text = list(tokens)
    for _ in range(count):
        text.append(int(logits_after(*[0, 0, *text][-2:])[:LETTERS].argmax()))
    return text[len(tokens) :]


def test_likeliest_tokens_are_proposed_for_all_sequences_of_a_step() -> None:
    bench = Bench()
    texts = [TEXT[:5], TEXT[3:10], TEXT[2:4]]
    candidates = [Candidate(job, 2 - job, array("i", text), most) for job, (text, most) in enumerate(
        zip(texts, (3, 5, 0), strict=True)
    )]  # fmt: skip
    bench.draft.propose(candidates)
    found = bench.draft.propose(candidates)
    assert [list(proposed) for proposed in found] == [likeliest(texts[0], 3), likeliest(texts[1], 5), []]
    sizes = [len(batch) for batch in bench.backend.batches]
    assert sizes[-5:] == [2, 2, 2, 1, 1], "sequences are computed together, as long as they need further tokens"


def test_only_new_tokens_are_computed_and_wrong_proposals_removed() -> None:
    bench = Bench()
    text = TEXT[:20]
    found = bench.proposed(text)
    assert bench.backend.held[0] == [*text, *found[:-1]]
    text += found  # all accepted, and one more token drawn
    text.append(2)
    before = len(bench.backend.batches)
    found = bench.propose(text)
    assert found == likeliest(text, 4)
    assert bench.backend.batches[before] == [(0, len(text) - 2, 2)]
    text += [found[0], (found[1] + 1) % LETTERS]  # the second one was wrong
    before = len(bench.backend.batches)
    assert bench.propose(text) == likeliest(text, 4)
    assert bench.backend.batches[before] == [(0, len(text) - 1, 1)]


def test_long_prompt_is_computed_in_pieces_of_limited_time() -> None:
    """The pace is measured: with a constant time per step the pieces grow until they are the rest."""
    bench = Bench(step_seconds=0.001)
    text = (TEXT * 3)[:500]
    assert bench.propose(text) == []
    assert bench.backend.batches == [[(0, 0, MIN_STEP_TOKENS)]]
    assert bench.draft.seconds == 0.0, "only the time of proposals counts"
    assert bench.draft.behind(Candidate(1, 0, array("i", text), 1)) == 500
    steps = 1
    while not bench.propose(text):
        steps += 1
    assert 1 < steps < 10
    assert bench.draft.seconds == pytest.approx(0.004)
    slow = Bench(step_seconds=10 * PIECE_SECONDS)
    for _ in range(5):
        assert slow.propose(text) == []
    assert slow.backend.batches == [[(0, at * MIN_STEP_TOKENS, MIN_STEP_TOKENS)] for at in range(5)]


def test_next_turn_of_a_conversation_continues_its_slot() -> None:
    bench = Bench()
    text = TEXT[:40]
    bench.proposed(text)
    bench.draft.end(1)
    before = len(bench.backend.batches)
    assert bench.proposed([*text, 3, 3, 3], job=2) == likeliest([3, 3], 4)
    assert bench.backend.batches[before][0][1] >= len(text)


def test_what_the_model_removes_is_removed_here() -> None:
    bench = Bench()
    bench.proposed(TEXT[:40])
    bench.draft.removed(0, 7)
    assert bench.backend.held[0] == TEXT[:7]
    assert bench.proposed(TEXT[:30]) == likeliest(TEXT[:30], 4)
    bench.draft.removed(0, 0)
    assert bench.backend.held[0] == []


@pytest.mark.parametrize("foreign", [-7, LETTERS])
def test_sequences_with_images_or_unknown_tokens_have_no_proposals(foreign: int) -> None:
    bench = Bench()
    assert bench.propose([1, 2, foreign]) == []
    assert bench.propose([1, 2, foreign, 1, 2, 3, 4, 5]) == []
    assert bench.propose([1, 2, 3, 4, 5, foreign], job=2, slot=1) == []
    assert bench.backend.batches == []
    bench.draft.end(1)
    assert bench.proposed([1, 2, 3])
    assert bench.propose([1, 2, 3, foreign]) == []


def test_proposals_end_with_the_context_of_the_draft_model() -> None:
    bench = Bench(context=12)
    assert len(bench.proposed(TEXT[:10], 5)) == 2
    assert bench.propose(TEXT[:12], 5) == []


def test_sequences_share_a_pool_of_cells() -> None:
    """Sequences that want no proposals make room, and one that does not fit has none."""
    bench = Bench(context=30, cells=30)
    bench.proposed(TEXT[:10], slot=0)
    bench.proposed(TEXT[:8], job=2, slot=1)
    assert bench.proposed(TEXT[:9], job=3, slot=2)
    assert sum(map(len, bench.backend.held)) <= 30
    assert not all(bench.backend.held)
    wanted = [Candidate(job, job, array("i", TEXT[: 11 + job]), 4) for job in range(3)]
    for _ in range(3):
        found = bench.draft.propose(wanted)
    assert [len(proposed) for proposed in found] == [4, 0, 0]
    assert sum(map(len, bench.backend.held)) <= 30


def test_after_an_error_a_step_has_no_proposals_and_after_three_no_step_has() -> None:
    bench = Bench()
    bench.proposed(TEXT[:10])
    bench.backend.fates = deque([Decode.COMPUTE_FAILED])
    assert bench.propose(TEXT[:11]) == []
    assert bench.backend.held == [[], [], []]
    assert bench.proposed(TEXT[:11]) == likeliest(TEXT[:11], 4)
    bench.backend.fates = deque([Decode.NO_ROOM] * 99)
    for _ in range(MAX_FAILURES + 2):
        assert bench.propose(TEXT[:20]) == []
    assert len(bench.backend.fates) == 99 - MAX_FAILURES


class Words:
    """A vocabulary."""

    def __init__(self, size: int, bos: int | None = 0, eos: int | None = 1, other: int = -1) -> None:
        self.n_vocab, self.bos, self.eos, self._other = size, bos, eos, other

    def raw_text(self, token: int) -> bytes:
        return b"other" if token == self._other else b"%d" % token


@pytest.mark.parametrize(
    ("draft", "difference"),
    [
        (Words(500), None),
        (Words(500 - MAX_PADDING), None),
        (Words(500 + MAX_PADDING + 1), "it has 629 tokens instead of 500"),
        (Words(500, bos=None), "its BOS token is None instead of 0"),
        (Words(500, eos=2), "its EOS token is 2 instead of 1"),
        (Words(500, other=300), "its token 300 is b'other' instead of b'300'"),
        (Words(510, other=505), None),
    ],
)
def test_vocabularies_agree_but_for_unused_tokens_at_their_end(draft: Words, difference: str | None) -> None:
    assert vocabulary_difference(Words(500), draft) == difference


def test_draft_model_is_part_of_the_need_and_of_the_expected_buffers() -> None:
    parts = {"gpu-0": Parts(100 * MIB, 0, 0), "cpu": Parts(0, 0, 0)}
    estimate = Estimate(parts, {"gpu-0": 5 * MIB}, "llama.cpp", "", 1, draft_bytes={"gpu-0": 50 * MIB, "cpu": MIB})
    assert estimate.need == {"gpu-0": 155 * MIB, "cpu": MIB}
    assert estimate.to_json()["devices"]["gpu-0"]["draft_bytes"] == 50 * MIB
    for count, is_right in ((150, True), (190, False), (60, False)):
        ready = Ready(1.0, (Buffer("gpu-0", "weights", count * MIB),), 16, ())
        assert (deviation(estimate, ready) is None) == is_right
