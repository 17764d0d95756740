"""Proposals of next tokens, and how many of them a step verifies."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.worker.engine.ngram_lookup import MAX_REPLACED, NgramLookup, NgramSource
from inference.worker.engine.speculation import (
    ANSWER_MEMORY,
    COSTLY_TRIAL_STEPS,
    MAX_PROPOSED,
    MEASURED_STEPS,
    MIN_STEPS,
    PLAIN_INTERVAL,
    TRIAL_STEPS,
    AcceptanceRate,
    Speculation,
)
from inference.worker.steps import Candidate
from inference.worker.worker_errors import UnloadedError
from tests.unit.test_worker_priority import BODIES, TellingEngine, apps, status


def proposed(tokens: Sequence[int], most: int = 4) -> list[int]:
    return list(NgramLookup().propose(array("i", tokens), most))


def test_what_followed_the_last_two_tokens_is_proposed() -> None:
    assert proposed([1, 2, 3, 4, 5, 6, 7, 1, 2]) == [3, 4, 5, 6]
    assert proposed([1, 2, 3, 4, 5, 6, 7, 1, 2], 2) == [3, 4]
    assert proposed([1, 2, 3, 1, 2, 4, 1, 2]) == [4, 1, 2, 4], "the last occurrence"


def test_nothing_is_proposed_without_an_earlier_occurrence() -> None:
    assert proposed([1, 2, 3, 4]) == []
    assert proposed([1]) == []
    assert proposed([]) == []
    assert proposed([1, 1]) == [], "the last n-gram itself is no earlier occurrence"


def test_proposal_that_reaches_the_last_token_repeats_itself() -> None:
    assert proposed([5, 8, 9, 8, 9], 5) == [8, 9, 8, 9, 8]


def test_images_are_not_proposed() -> None:
    """Image tokens are negative."""
    assert proposed([1, 2, 3, -7, -7, 9, 1, 2]) == [3]
    assert proposed([1, 2, -7, 9, 1, 2]) == []


def test_long_prompts_are_indexed_at_once() -> None:
    text = list(range(1000, 3000))
    assert proposed([*text, *text[500:510]]) == text[510:514]


def test_earlier_text_is_followed_behind_replaced_tokens() -> None:
    """One token at a time, until one is as expected; after too many differences it is given up."""
    tokens = array("i", [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2])
    lookup = NgramLookup()
    assert lookup.propose(tokens, 3) == [3, 4, 5]
    tokens.append(30)
    assert lookup.propose(tokens, 3) == [4]
    tokens.append(4)
    assert lookup.propose(tokens, 3) == [5, 6, 7]
    for number in range(MAX_REPLACED):
        tokens.append(40 + number)
        assert lookup.propose(tokens, 3) == [6 + number]
    tokens.append(50)
    assert lookup.propose(tokens, 3) == ()


def test_another_earlier_occurrence_is_used_after_a_wrong_token() -> None:
    tokens = array("i", [7, 8, 1, 2, 9, 9, 1, 2, 3, 4, 5, 0, 1, 2])
    lookup = NgramLookup()
    assert lookup.propose(tokens, 2) == [3, 4]
    tokens.extend([7, 8])
    assert lookup.propose(tokens, 2) == [1, 2]


@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(0, 3), max_size=600), st.integers(1, 6))
def test_proposals_continue_an_occurrence(prompt: list[int], answer: list[int], most: int) -> None:
    """However the table grows, what is proposed after a new n-gram match stood behind the last two tokens before."""
    tokens, lookup = array("i", prompt), NgramLookup()
    for token in answer:
        found = lookup.propose(tokens, most)
        assert len(found) in (0, 1, most)
        fresh = NgramLookup().propose(tokens, most)
        text = list(tokens)
        starts = [at + 2 for at in range(len(text) - 2) if text[at : at + 2] == text[-2:]]
        continuations = [(text[at:] * most)[:most] for at in starts]
        assert not fresh or fresh in continuations
        tokens.append(token)


def rate(correct: float, wrong: float) -> AcceptanceRate:
    return AcceptanceRate(ANSWER_MEMORY, correct, wrong)


def test_acceptance_begins_with_the_rate_of_the_model_and_forgets() -> None:
    known = rate(0, 0)
    assert known.share(0.3) == pytest.approx(0.3)
    known.note(4, 4)
    assert known.share(0.5) == pytest.approx(5 / 6)
    known.note(1, 0)
    assert (known.correct, known.wrong) == pytest.approx((4 * ANSWER_MEMORY, 1.0))


REPEATED = array("i", [*range(10, 40), 10, 11])
PLAIN_STEPS = MIN_STEPS


def proposals(speculation: Speculation, sequences: int, job: int, most: int = 99) -> Sequence[int]:
    (found,) = speculation.propose([Candidate(job, 0, REPEATED, most)], sequences)
    return found


def lengths(speculation: Speculation, sequences: int, job: int = 1) -> int:
    return len(proposals(speculation, sequences, job))


def new(plain: float = 0.010, sequences: int = 1) -> Speculation:
    """A model whose steps without proposals were measured."""
    speculation = Speculation(NgramSource())
    for _ in range(PLAIN_STEPS):
        speculation.note_step(sequences, 0, plain)
    return speculation


def measured(plain: float, proposal: float, sequences: int = 1) -> Speculation:
    """A model with measured times; all of its answers repeat themselves."""
    speculation = new(plain, sequences)
    for _ in range(40):
        proposals(speculation, sequences, 0)
        speculation.note_drawn(0, list(range(12, 28)))
    for _ in range(3):
        speculation.note_step(sequences, 2, plain + 2 * proposal)
    return speculation


def test_nothing_is_verified_before_steps_were_measured() -> None:
    speculation = Speculation(NgramSource())
    for _ in range(PLAIN_STEPS):
        assert lengths(speculation, 1) == 0
        speculation.note_step(1, 0, 0.010)
    assert lengths(speculation, 1) > 0


def test_more_is_verified_where_more_is_accepted() -> None:
    speculation = new()
    before = lengths(speculation, 1)
    assert 0 < before < MAX_PROPOSED
    speculation.note_drawn(1, [12, 13, 14, 15])
    assert before < lengths(speculation, 1)
    assert len(proposals(speculation, 1, 1, most=2)) == 2, "at most what fits into the step"


def test_nothing_is_verified_where_little_is_accepted() -> None:
    """What was proposed is compared with what is drawn even if it is not verified, so that a change is noticed."""
    speculation = new()
    for _ in range(30):
        lengths(speculation, 1)
        speculation.note_drawn(1, [99])
    assert lengths(speculation, 1) == 0
    assert lengths(speculation, 1, job=2) == 0, "the next answer begins with the rate of the model"
    for _ in range(30):
        speculation.note_drawn(1, [12])
        lengths(speculation, 1)
    assert lengths(speculation, 1) > 0


def test_free_proposals_are_all_verified() -> None:
    assert lengths(measured(0.010, 0.0), 1) == MAX_PROPOSED


def test_nothing_is_verified_when_many_sequences_make_it_too_slow() -> None:
    """The same time of a proposed token is worth it for one sequence, and not for eight."""
    assert lengths(measured(0.010, 0.002), 1) > 4
    assert lengths(measured(0.020, 0.0025, sequences=8), 8) == 0
    assert lengths(new(sequences=8), 8) == 0, "not before it was measured"


def test_times_of_proposals_are_measured_again() -> None:
    """Where proposals did not pay, one is verified after a number of steps, if it is likely to be right."""
    speculation = measured(0.010, 0.010)
    for _ in range(TRIAL_STEPS - 1):
        speculation.note_step(1, 0, 0.010)
    assert lengths(speculation, 1) == 0
    speculation.note_step(1, 0, 0.010)
    assert lengths(speculation, 1) == 1
    speculation.note_step(1, 1, 0.020)
    assert lengths(speculation, 1) == 0
    for _ in range(5):
        speculation.note_step(1, 1, 0.010)
    assert lengths(speculation, 1) > 0


def test_times_without_proposals_are_measured_again() -> None:
    """By the second of two steps: the first one has another shape than the step before."""
    speculation = measured(0.010, 0.001)
    for _ in range(PLAIN_INTERVAL + 1):
        speculation.note_step(1, 4, 0.014)
    assert lengths(speculation, 1) == 0
    speculation.note_step(1, 0, 0.010)
    assert lengths(speculation, 1) == 0
    speculation.note_step(1, 0, 0.010)
    assert lengths(speculation, 1) > 0


def test_delay_of_the_next_step_is_a_part_of_the_time() -> None:
    speculation = measured(0.010, 0.001)
    assert lengths(speculation, 1) > 0
    for _ in range(MEASURED_STEPS):
        speculation.note_step(1, 2, 0.012)
        speculation.note_step(1, 0, 0.026)
    assert lengths(speculation, 1) == 0


def test_unlikely_proposals_are_no_trials() -> None:
    speculation = new(sequences=8)
    for _ in range(30):
        lengths(speculation, 8)
        speculation.note_drawn(1, [99])
    for _ in range(TRIAL_STEPS * 8):
        speculation.note_step(8, 0, 0.010)
    assert lengths(speculation, 8) == 0


def test_single_slow_steps_do_not_count() -> None:
    speculation = measured(0.010, 0.002)
    before = lengths(speculation, 1)
    speculation.note_step(1, 4, 9.0)
    speculation.note_step(1, 0, 9.0)
    speculation.note_step(1, 0, 9.0)
    assert lengths(speculation, 1) == before > 0


def test_clock_without_resolution_is_no_measurement() -> None:
    assert lengths(measured(0.0, 0.0), 1) > 0


def test_state_of_an_answer_is_removed_when_it_ends() -> None:
    speculation = Speculation(NgramSource())
    lengths(speculation, 1)
    speculation.note_drawn(1, [12] * 9)
    speculation.end(1)
    speculation.end(1)
    speculation.note_drawn(1, [12])
    assert speculation.propose([Candidate(3, 0, array("i", [1, 2, 3]), 9)], 1) == [()]
    speculation.note_drawn(3, [4])


def test_earlier_text_has_nothing_to_compute() -> None:
    assert NgramSource().behind(Candidate(1, 0, REPEATED, 9)) == 0


async def test_requests_with_a_seed_have_no_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    """They repeat to the byte, and what is proposed depends on measured times."""
    path = "/v1/completions"
    with ThreadPoolExecutor(1) as executor:
        app, engine = apps(executor, path)
        assert isinstance(engine, TellingEngine)
        engine.start()
        for more, speculates in (({}, True), ({"seed": 7}, False), ({"seed": -1}, True)):
            monkeypatch.setitem(BODIES, path, {"prompt": [104, 105], "max_tokens": 2, **more})
            assert await status(app, path, "") == 200
            assert engine.work.speculates == speculates
    assert engine.stop(UnloadedError())


class CostlySource:
    """A source whose proposals take time, and which records how many were asked for."""

    is_free = False

    def __init__(self, seconds: float = 0.0, behind: int = 0) -> None:
        self.seconds = seconds
        self.lag = behind
        self.asked: list[int] = []

    def propose(self, candidates: Sequence[Candidate]) -> list[list[int]]:
        self.asked = [candidate.most for candidate in candidates]
        return [list(range(most)) for most in self.asked]

    def behind(self, candidate: Candidate) -> int:
        return self.lag

    def removed(self, slot: int, start: int) -> None:
        self.asked = [slot, start]

    def end(self, job: int) -> None:
        self.asked = []


def with_costly(source: CostlySource, plain: float = 0.010) -> Speculation:
    speculation = Speculation(source)
    for _ in range(PLAIN_STEPS):
        speculation.note_step(1, 0, plain)
    return speculation


def test_costly_source_is_asked_for_as_many_tokens_as_are_verified() -> None:
    source = CostlySource()
    speculation = with_costly(source)
    assert lengths(speculation, 1) == source.asked[0] > 0
    speculation.removed(2, 7)
    assert source.asked == [2, 7]


def test_time_of_a_source_counts() -> None:
    cheap, costly = CostlySource(), CostlySource(seconds=0.020)
    found = []
    for source in (cheap, costly):
        speculation = with_costly(source)
        for _ in range(MEASURED_STEPS):
            proposals(speculation, 1, 0)
            speculation.note_drawn(0, range(4))
            speculation.note_step(1, 2, 0.010)
        found.append(lengths(speculation, 1))
    assert found == [MAX_PROPOSED, 0]


def test_costly_source_is_tried_again_after_wrong_proposals_and_later_if_it_lags_behind() -> None:
    for behind in (0, 100):
        speculation = with_costly(CostlySource(behind=behind))
        for _ in range(50):
            proposals(speculation, 1, 0)
            speculation.note_drawn(0, [99])
            speculation.note_step(1, 1, 0.030)
        speculation.note_step(1, 0, 0.010)
        steps = 1
        while not lengths(speculation, 1, job=steps + 1):
            speculation.note_step(1, 0, 0.010)
            steps += 1
        assert steps == COSTLY_TRIAL_STEPS + behind // 2


def test_first_trial_of_a_costly_source_waits_where_proposals_are_not_expected_to_pay() -> None:
    """The source would compute the prompts of all sequences for it."""
    speculation = Speculation(CostlySource())
    for steps in range(COSTLY_TRIAL_STEPS * 8):
        assert lengths(speculation, 8) == 0, steps
        speculation.note_step(8, 0, 0.010)
    assert lengths(speculation, 8) > 0
    for _ in range(MIN_STEPS):
        speculation.note_step(8, 8, 0.011)
    assert lengths(speculation, 8) > 0, "one that pays continues"
