"""Edge cases of scheduler and pacing: limits, invalid jobs, budgets of steps."""

from __future__ import annotations

import pytest

from gateway.settings import DeadlineSettings
from inference.worker.answers.stop_strings import StopFilter
from inference.worker.engine.prefill_pacing import (
    CREDIT_SECONDS,
    DEBT_SECONDS,
    LONGEST_SECONDS,
    MIXED_SECONDS,
    SLOWEST,
    SMALLEST,
    STEP_SECONDS,
    TOKEN_SECONDS,
    Pace,
)
from inference.worker.engine.scheduler import LAST_PART, Scheduler
from inference.worker.engine_stats import HUNG_STEP_SECONDS
from inference.worker.steps import Copy, Job, Limits, Remove

ALONE = {"decoding": 0, "prompts": 1}

LIMITS = Limits(slots=2, context=20, batch=8, queue=2)


@pytest.mark.parametrize(
    "wrong", [{"slots": 0}, {"slots": 9}, {"copied": 0}, {"context": 0}, {"queue": -1}], ids=lambda wrong: str(wrong)
)
def test_invalid_limits_raise_value_error(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="invalid limits"):
        Limits(**{"slots": 2, "context": 20, "batch": 8, "queue": 2, **wrong})


@pytest.mark.parametrize("prompt", [(), (1,) * 21])
def test_job_with_invalid_prompt_length_raises_value_error(prompt: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="is invalid"):
        Scheduler(LIMITS).submit([Job(1, prompt)])


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopFilter(["a", ""])


def test_abort_of_an_ended_job_is_ignored() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.abort(7)
    assert not scheduler.has_work


def test_no_room_for_a_single_job_ends_it_and_empties_its_slot() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.submit([Job(1, (1,) * 12)])
    scheduler.plan(0.0, 8)
    scheduler.computed()
    scheduler.plan(0.0, 8)
    assert scheduler.no_room() == (1,)
    assert scheduler.plan(0.0, 8).operations == (Remove(0, 0),)


def test_shared_prefix_is_copied_and_the_old_answer_is_retained() -> None:
    """With an empty slot at hand a retained sequence keeps its tail; without one, its tail is what goes."""
    scheduler = Scheduler(LIMITS)
    for id, prompt in ((1, (1, 2, 3, 4)), (2, (1, 2, 3, 9)), (3, (1, 2, 7))):
        scheduler.submit([Job(id, prompt)])
        step = scheduler.plan(0.0, 8)
        scheduler.computed()
        scheduler.finish(id)
        if id == 2:
            assert step.operations == (Copy(0, 1, 3),)
        if id == 3:
            assert step.operations == (Remove(0, 2),)
            assert step.rows[0].start == 2


def test_oldest_prompt_gets_a_token_even_with_the_smallest_budget() -> None:
    scheduler = Scheduler(Limits(slots=3, context=20, batch=8, queue=3))
    scheduler.submit([Job(1, (1,) * 10), Job(2, (2,) * 4)])
    assert [(row.job, len(row.tokens)) for row in scheduler.plan(0.0, 2).rows] == [(1, 1), (2, 1)]
    scheduler.computed()
    assert [(row.job, len(row.tokens)) for row in scheduler.plan(0.0, 1).rows] == [(1, 1)]


def test_a_batch_has_room_for_a_prompt_beside_all_others_that_decode() -> None:
    scheduler = Scheduler(Limits(slots=3, context=20, batch=3, queue=3))
    scheduler.submit([Job(1, (1,)), Job(2, (2,)), Job(3, (3, 3, 3))])
    assert [(row.job, len(row.tokens)) for row in scheduler.plan(0.0, 8).rows] == [(1, 1), (2, 1), (3, 1)]


def test_prompt_pieces_grow_and_shrink_towards_their_time() -> None:
    pace = Pace.first(2048)
    for _ in range(10):
        pace = pace.observe(
            budget := pace.budget(STEP_SECONDS), budget, STEP_SECONDS / 4, STEP_SECONDS, decoding=0, prompts=1
        )
    assert pace.budget(STEP_SECONDS) == 2048
    for _ in range(10):
        pace = pace.observe(
            budget := pace.budget(STEP_SECONDS), budget, STEP_SECONDS * 9, STEP_SECONDS, decoding=0, prompts=1
        )
    assert pace.budget(STEP_SECONDS) == SMALLEST
    settled = Pace(2048, 1000)

    def after(prompt_tokens: int, seconds: float) -> Pace:
        return settled.observe(prompt_tokens, prompt_tokens, seconds, STEP_SECONDS, decoding=0, prompts=1)

    assert after(1000, STEP_SECONDS) == settled
    assert after(0, 100.0) == settled, "a step that prefills nothing tells nothing"
    assert after(1, STEP_SECONDS / 2) == settled, "nor does a short one with little of it"
    assert after(400, STEP_SECONDS / 20) == Pace(2048, 2000), "unless that they are cheaper than was known"
    assert after(800, STEP_SECONDS * 2).tokens == 400, "one that was too long does"
    assert Pace.first(8).budget(STEP_SECONDS) == 8


def test_decoding_rows_count_in_the_time_of_a_step() -> None:
    pace = Pace(2048, 1000).observe(600, 800, STEP_SECONDS, STEP_SECONDS, decoding=1, prompts=1)
    assert pace.tokens == 800


def test_step_of_a_slow_model_has_a_minimum_of_tokens() -> None:
    def settled(token_seconds: float) -> Pace:
        pace = Pace.first(2048)
        for _ in range(9):
            tokens = pace.budget(LONGEST_SECONDS)
            pace = pace.observe(tokens, tokens, tokens * token_seconds, LONGEST_SECONDS, decoding=0, prompts=1)
        return pace

    assert settled(TOKEN_SECONDS / 2).budget(STEP_SECONDS) == 2 * STEP_SECONDS / TOKEN_SECONDS
    for times in (1, 2, SLOWEST):
        assert settled(TOKEN_SECONDS * times).budget(STEP_SECONDS) == STEP_SECONDS / TOKEN_SECONDS
    assert settled(TOKEN_SECONDS * SLOWEST * 2).budget(STEP_SECONDS) == STEP_SECONDS / TOKEN_SECONDS / 2
    slow = settled(TOKEN_SECONDS * 4).observe(100, 100, 0.8, STEP_SECONDS, decoding=1, prompts=1)
    assert slow.credit_seconds == pytest.approx(CREDIT_SECONDS + MIXED_SECONDS - 0.2), "and takes of the credit less"


def test_step_of_a_slow_model_is_not_considered_hung() -> None:
    """What streams take of it comes on top."""
    longest = SLOWEST * LONGEST_SECONDS * (1 + 1 / LAST_PART)
    assert longest < 0.95 * HUNG_STEP_SECONDS
    assert DeadlineSettings().inter_token > HUNG_STEP_SECONDS


def test_few_streams_are_delayed_longer_for_many_prompts() -> None:
    pace = Pace(2048, 1000)
    assert pace.seconds(0, 1) == pace.seconds(0, 9) == LONGEST_SECONDS, "that is no stream"
    assert pace.seconds(4, 1) == pace.seconds(4, 4) == STEP_SECONDS
    assert pace.seconds(4, 6) == pytest.approx(1.5 * STEP_SECONDS)
    assert pace.seconds(1, 31) == LONGEST_SECONDS
    assert pace.seconds(4, 1, just_begun=True) == LONGEST_SECONDS, "once, before they go on"
    assert Pace(2048, 1000, 0.0).seconds(4, 4, just_begun=True) == MIXED_SECONDS, "as far as it was not done before"
    assert pace.budget(LONGEST_SECONDS) == 2048


def test_delayed_streams_catch_up_before_the_next_long_delay() -> None:
    pace = Pace(2048, 1000)
    held = 0
    while (allowed := pace.seconds(1, 1)) == STEP_SECONDS:
        pace = pace.observe(1000, 1000, STEP_SECONDS, allowed, decoding=1, prompts=1)
        held += 1
    assert held == pytest.approx(CREDIT_SECONDS / (STEP_SECONDS - MIXED_SECONDS), abs=1)
    while pace.credit_seconds > 0:
        pace = pace.observe(1000, 1000, STEP_SECONDS, STEP_SECONDS, decoding=1, prompts=1)
    assert pace.credit_seconds < 0, "the last step took more than there was"
    assert pace.budget(pace.seconds(1, 1)) == SMALLEST, "which is paid back"
    for _ in range(9):
        pace = pace.observe(1000, 1000, 9.0, STEP_SECONDS, decoding=1, prompts=1)
    assert pace.credit_seconds == -DEBT_SECONDS, "a machine that stood still is not made up for"
    owing = Pace(2048, 1000, -DEBT_SECONDS)
    short = owing.observe(15, 19, 0.1, owing.seconds(4, 1), decoding=4, prompts=1)
    assert short.tokens == owing.tokens, "a short step tells nothing of the costs, in debt either"
    pace = Pace(2048, pace.tokens, 0.0)
    assert pace.seconds(9, 9) == MIXED_SECONDS
    assert pace.seconds(2, 6) == pytest.approx(3 * MIXED_SECONDS), "more wait for it than are held up"
    for _ in range(4):
        pace = pace.observe(0, 1, 0.01, MIXED_SECONDS, decoding=1, prompts=1)
    assert pace.seconds(1, 1) == pytest.approx(STEP_SECONDS)
    drained = Pace(2048, 1000, 0.0)
    idle = drained.observe(0, 0, 0.01, STEP_SECONDS, decoding=0, prompts=1)
    assert idle.credit_seconds == CREDIT_SECONDS, "no stream was delayed"
    kept = drained.observe(200, 200, MIXED_SECONDS, MIXED_SECONDS, decoding=1, prompts=1)
    assert kept.credit_seconds == pytest.approx(0.0)
