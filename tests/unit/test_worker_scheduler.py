"""Single cases of the scheduler: scored prompts, suspended jobs, shared prefixes, limits, saved sequences."""

from __future__ import annotations

import tracemalloc
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.settings import DeadlineSettings
from headgate.shared.kv_hint import KvHint
from inference.protocol import FULL_FOR, RETRY_AFTER, Priority
from inference.worker.answers.generation import StopFilter
from inference.worker.engine.engine_work import QueueEstimate
from inference.worker.engine.prefill_pacing import (
    CREDIT_SECONDS,
    DEBT_SECONDS,
    LARGEST_DISCOUNT,
    LONGEST_SECONDS,
    MIN_STEP_TOKENS,
    MIXED_SECONDS,
    STEP_SECONDS,
    TOKEN_SECONDS,
    Pace,
)
from inference.worker.engine.scheduler import LAST_PART, Scheduler
from inference.worker.engine_stats import HUNG_STEP_SECONDS, MIN_TOKENS, WINDOW_SECONDS, TokenRate
from inference.worker.kv.catalog import Catalog
from inference.worker.kv.checkpoints import max_checkpoints
from inference.worker.steps import (
    Checkpoint,
    Copy,
    Job,
    Limits,
    Load,
    Operation,
    Remove,
    RestoreCheckpoint,
    Row,
    SaveCheckpoint,
    Store,
    StoredSequence,
    perform_all,
)


def rows_of(scheduler: Scheduler, budget: int = 8) -> list[Row]:
    rows = list(scheduler.plan(0.0, budget).rows)
    scheduler.computed()
    return rows


def test_scored_prompt_stays_within_the_outputs_of_a_step() -> None:
    """One output stays free for each other job."""
    scheduler = Scheduler(Limits(slots=2, context=40, batch=30, queue=4, outputs=7))
    scheduler.submit([Job(1, (1,) * 10, score=True), Job(2, (2,) * 20)])
    assert [(row.job, len(row.tokens), row.every) for row in rows_of(scheduler, 30)] == [(1, 6, True), (2, 20, False)]
    scheduler.extend(2, 9)
    assert [(row.job, len(row.tokens), row.every) for row in rows_of(scheduler, 30)] == [(1, 4, True), (2, 1, False)]


def prefilled(prompts: list[int], budget: int, batch: int = 512, decoding: int = 0) -> list[int]:
    """Tokens of each prompt in the first step beside `decoding` streams."""
    scheduler = Scheduler(Limits(slots=8, context=2000, batch=batch, queue=4))
    for number in range(100, 100 + decoding):
        scheduler.submit([Job(number, (number,))])
        rows_of(scheduler, budget)
        for stream in range(100, number + 1):
            scheduler.extend(stream, 7)
    scheduler.submit([Job(number, (number,) * length) for number, length in enumerate(prompts)])
    lengths = {row.job: len(row.tokens) for row in rows_of(scheduler, budget)}
    return [lengths.get(number, 0) for number in range(len(prompts))]


def test_short_prompts_are_prefilled_whole() -> None:
    """A part would need two computations."""
    assert prefilled([80, 80, 80, 80], 180) == [80, 80, 0, 0]
    assert prefilled([80, 80, 80, 80], 200) == [80, 80, 80, 0], "with a quarter more the third is complete"
    assert prefilled([80, 80, 80, 80], 320) == [80, 80, 80, 80]
    assert prefilled([400, 80, 80, 80], 200) == [50, 80, 80, 0], "the oldest prompt has its share"


def test_long_prompt_takes_the_rest_of_the_budget_if_it_is_large() -> None:
    assert prefilled([80, 1000], 160) == [80, 80]
    assert prefilled([80, 1000], 159) == [80, 0]
    assert prefilled([1000, 900], 100) == [25, 75]


def test_budget_is_exceeded_to_complete_a_prompt_within_the_batch() -> None:
    """A small rest would delay all streams for another step."""
    assert [prefilled([length], 400, decoding=1) for length in (300, 401, 500, 501)] == [[300], [401], [500], [400]]
    assert prefilled([460], 400, batch=450) == [400]


def test_budget_is_exceeded_by_half_to_complete_all_prompts() -> None:
    assert prefilled([80] * 7, 374, batch=1000, decoding=1) == [80] * 7
    assert prefilled([80] * 7, 373, batch=1000, decoding=1) == [80] * 5 + [0] * 2, "not all would be complete"
    assert prefilled([80] * 4, 240, decoding=4) == [80] * 3 + [0], "as many streams would be delayed as prompts wait"
    assert prefilled([80] * 7, 374, batch=561, decoding=1) == [80] * 7
    assert prefilled([80] * 7, 374, batch=560, decoding=1) == [80] * 5 + [0] * 2, "the batch is full"


def test_scored_tokens_are_not_scored_again_after_preemption() -> None:
    scheduler = Scheduler(Limits(slots=2, context=40, batch=30, queue=4, outputs=6))
    scheduler.submit([Job(1, (1,)), Job(2, (2,) * 12, score=True)])
    assert [len(row.tokens) for row in rows_of(scheduler, 30)] == [1, 5]
    scheduler.extend(1, 9)
    scheduler.plan(0.0, 30)
    assert scheduler.no_room() == ()
    scheduler.plan(0.0, 30)
    scheduler.computed()
    scheduler.finish(1)
    again = [(row.start, len(row.tokens), row.every) for _ in range(3) for row in rows_of(scheduler, 30)]
    assert again == [(0, 5, False), (5, 6, True), (11, 1, True)]


def test_suspended_job_resumes_at_its_old_place() -> None:
    scheduler = Scheduler(Limits(slots=1, context=20, batch=8, queue=4))
    scheduler.submit([Job(1, (1,) * 4), Job(2, (2,) * 4), Job(3, (3,) * 4)])
    assert [row.job for row in rows_of(scheduler)] == [1]
    scheduler.extend(1, 9)
    scheduler.suspend(1)
    scheduler.suspend(3)
    scheduler.suspend(3)
    assert [row.job for row in rows_of(scheduler)] == [2]
    scheduler.finish(2)
    assert not scheduler.has_work
    scheduler.resume(3)
    scheduler.resume(1)
    scheduler.resume(1)
    scheduler.resume(99)
    (row,) = rows_of(scheduler)
    assert (row.job, row.sample) == (1, True)
    scheduler.resume(1)
    scheduler.finish(1)
    assert [row.job for row in rows_of(scheduler)] == [3]
    scheduler.suspend(3)
    scheduler.abort(3)
    assert (scheduler.active, scheduler.queued) == (0, 0)


def test_prefix_of_a_running_sequence_is_copied() -> None:
    """The longest of several, without the last token."""
    scheduler = Scheduler(Limits(slots=3, context=30, batch=30, queue=4))
    scheduler.submit([Job(1, (1, 2, 3, 4, 5)), Job(2, (1, 2, 9))])
    rows_of(scheduler, 30)
    scheduler.extend(1, 6)
    scheduler.extend(2, 6)
    scheduler.submit([Job(3, (1, 2, 3, 4))])
    step = scheduler.plan(0.0, 30)
    assert step.operations == (Copy(0, 2, 3),)
    assert [row.start for row in step.rows if row.job == 3] == [3]


def test_short_prefix_is_computed_instead_of_copied() -> None:
    """In its own slot it is reused, but a short tail of it is not. Choices of one request do not wait for it."""
    scheduler = Scheduler(Limits(slots=3, context=30, batch=30, queue=4, min_copied=4))
    scheduler.submit([Job(1, (1, 2, 3, 4), group=1), Job(2, (1, 2, 3, 4), group=1)])
    assert {row.job for row in rows_of(scheduler, 30)} == {1, 2}
    scheduler.extend(1, 9)
    scheduler.extend(2, 9)
    scheduler.submit([Job(3, (1, 2, 3, 9))])
    step = scheduler.plan(0.0, 30)
    assert step.operations == ()
    assert [(row.slot, row.start) for row in step.rows if row.job == 3] == [(2, 0)]
    scheduler.computed()
    for job in (1, 2):
        scheduler.extend(job, 9)
    scheduler.finish(3)
    scheduler.submit([Job(4, (1, 2, 7))])
    step = scheduler.plan(0.0, 30)
    assert step.operations == (Remove(2, 2),)
    assert (2, 2) in [(row.slot, row.start) for row in step.rows]


def test_retained_prefix_is_not_dropped_for_a_short_match() -> None:
    """The least recently used slot is overwritten, although another one shares a token."""
    scheduler = Scheduler(Limits(slots=2, context=30, batch=30, queue=4, min_copied=4))
    for job, prompt in ((1, (1, 2, 3, 4, 5)), (2, (6, 7, 8, 9, 5))):
        scheduler.submit([Job(job, prompt)])
        rows_of(scheduler, 30)
        scheduler.finish(job)
    scheduler.submit([Job(3, (6, 2, 2, 2, 2))])
    (row,) = rows_of(scheduler, 30)
    assert (row.slot, row.start) == (0, 0)
    scheduler.finish(3)
    scheduler.submit([Job(4, (6, 7, 8, 9, 1))])
    (row,) = rows_of(scheduler, 30)
    assert (row.slot, row.start) == (1, 4)


def test_neighbors_of_taken_slots_are_assigned_first() -> None:
    """llama.cpp computes sequences with consecutive numbers together."""
    scheduler = Scheduler(Limits(slots=4, context=30, batch=30, queue=4))
    scheduler.submit([Job(number, (number,)) for number in (1, 2, 3)])
    assert [row.slot for row in rows_of(scheduler)] == [0, 1, 2]
    scheduler.finish(1)
    scheduler.submit([Job(4, (4, 4))])
    assert [row.slot for row in scheduler.plan(0.0, 8).rows if row.job == 4] == [3]


def after(order: str, min_copied: int = 2) -> Scheduler:
    """Five slots that retain prompts of four tokens, (10, 10, 10, 10) in slot 0 and so on, used in this order."""
    scheduler = Scheduler(Limits(slots=5, context=90, batch=90, queue=9, min_copied=min_copied))
    scheduler.submit([Job(number, (10 + number,) * 4) for number in range(5)])
    assert [row.slot for row in rows_of(scheduler, 90)] == [0, 1, 2, 3, 4]
    for number in order:
        scheduler.finish(int(number))
    return scheduler


def test_running_sequences_use_neighboring_slots() -> None:
    """The prefix retained in the next slot moves to the least recently used one, and is found there."""
    scheduler = after("20413")
    scheduler.submit([Job(10, (1, 1, 1)), Job(11, (2, 2, 2))])
    step = scheduler.plan(0.0, 90)
    assert [(row.job, row.slot, row.start) for row in step.rows] == [(11, 1, 0), (10, 2, 0)]
    assert step.operations == (Remove(2, 0), Remove(0, 0), Copy(1, 0, 4), Remove(1, 0))
    scheduler.computed()
    for job in (10, 11):
        scheduler.finish(job)
    scheduler.submit([Job(12, (11, 11, 11, 11, 9))])
    assert [(row.slot, row.start) for row in scheduler.plan(0.0, 90).rows] == [(0, 4)]


def test_gap_between_running_sequences_is_filled_before_the_slot_after_them() -> None:
    """The prefix retained in the gap moves."""
    scheduler = after("01234")
    scheduler.submit([Job(number, (number,) * 3) for number in (5, 6, 7)])
    assert [row.slot for row in rows_of(scheduler, 90)] == [0, 1, 2]
    for job in (5, 6, 7):
        scheduler.extend(job, 9)
    scheduler.finish(6)
    scheduler.submit([Job(8, (8, 8, 8))])
    step = scheduler.plan(0.0, 90)
    assert [(row.job, row.slot) for row in step.rows] == [(5, 0), (8, 1), (7, 2)]
    assert step.operations == (Remove(3, 0), Copy(1, 3, 3), Remove(1, 0))


def test_retained_prefix_moves_next_to_running_sequences() -> None:
    scheduler = after("01234")
    scheduler.submit([Job(10, (1, 1, 1)), Job(11, (14, 14, 14, 14, 9))])
    step = scheduler.plan(0.0, 90)
    assert [(row.job, row.slot, row.start) for row in step.rows] == [(10, 0, 0), (11, 1, 4)]
    assert step.operations == (Remove(0, 0), Remove(1, 0), Copy(4, 1, 4), Remove(4, 0))


def test_retained_prefix_next_to_running_sequences_moves_away_for_a_short_prompt() -> None:
    """The nearest slot is used; its prefix is worth more than the one shared token."""
    scheduler = after("20413")
    scheduler.submit([Job(10, (1, 1, 1)), Job(11, (11, 2, 2))])
    step = scheduler.plan(0.0, 90)
    assert [(row.job, row.slot, row.start) for row in step.rows] == [(11, 1, 0), (10, 2, 0)]
    assert Copy(1, 0, 4) in step.operations


def test_small_and_large_prefixes_are_not_moved() -> None:
    """Short prefixes are dropped; copying a large context costs more than a gap."""
    little = after("20413", min_copied=5)
    little.submit([Job(10, (1, 1, 1)), Job(11, (2, 2, 2))])
    assert little.plan(0.0, 90).operations == (Remove(2, 0), Remove(1, 0))
    much = after("20413", min_copied=65)
    much.submit([Job(10, (1, 1, 1)), Job(11, (2, 2, 2))])
    assert [row.slot for row in much.plan(0.0, 90).rows] == [0, 2]


def test_forget_drops_retained_prefixes_only() -> None:
    scheduler = Scheduler(Limits(slots=2, context=20, batch=8, queue=4))
    scheduler.submit([Job(1, (1,) * 4), Job(2, (2,) * 4)])
    rows_of(scheduler)
    scheduler.finish(1)
    scheduler.slots.forget()
    scheduler.extend(2, 9)
    step = scheduler.plan(0.0, 8)
    assert step.operations == (Remove(0, 0),)
    assert [(row.job, row.start) for row in step.rows] == [(2, 4)]


def test_lower_limit_ends_no_running_sequence() -> None:
    """A limit applies to waiting jobs; running jobs keep their slots."""
    scheduler = Scheduler(Limits(slots=2, context=20, batch=8, queue=4))
    scheduler.limit(1)
    scheduler.submit([Job(1, (1,) * 4), Job(2, (2,) * 4)])
    assert [row.job for row in rows_of(scheduler)] == [1]
    scheduler.limit(2)
    scheduler.extend(1, 9)
    assert [row.job for row in rows_of(scheduler)] == [1, 2]
    scheduler.limit(1)
    scheduler.extend(1, 9)
    scheduler.extend(2, 9)
    assert [row.job for row in rows_of(scheduler)] == [1, 2]


def test_first_token_removes_only_the_deadline_of_its_request() -> None:
    scheduler = Scheduler(Limits(slots=2, context=50, batch=8, queue=10))
    scheduler.submit([Job(number, (1, 2), deadline=5.0, request=1) for number in (1, 2, 3)])
    scheduler.submit([Job(number, (1, 2), deadline=5.0) for number in (4, 5)])
    assert [row.job for row in scheduler.plan(0.0, 8).rows] == [1, 2]
    scheduler.computed()
    scheduler.extend(1, 9)
    scheduler.finish(2)
    assert scheduler.plan(5.0, 8).expired == (4, 5)
    scheduler.computed()
    scheduler.finish(1)
    scheduler.finish(3)
    scheduler.submit([Job(6, (1, 2), deadline=9.0)])
    assert [row.job for row in scheduler.plan(6.0, 8).rows] == [6]
    scheduler.computed()
    scheduler.extend(6, 9)
    assert scheduler.plan(9.0, 8).expired == ()


def test_failed_sampling_does_not_remove_the_deadline() -> None:
    """The other waiting jobs of the request expire at it."""
    scheduler = Scheduler(Limits(slots=1, context=50, batch=8, queue=10))
    scheduler.submit([Job(number, (1, 2), deadline=5.0, request=1) for number in (1, 2)])
    assert [row.job for row in scheduler.plan(0.0, 8).rows] == [1]
    scheduler.computed()
    scheduler.abort(1)
    assert scheduler.plan(5.0, 8).expired == (2,)


@pytest.mark.parametrize("goes_on", [True, False], ids=["it continues", "it has finished"])
def test_first_token_removes_the_deadline_of_all_choices(goes_on: bool) -> None:
    scheduler = Scheduler(Limits(slots=1, context=50, batch=8, queue=10))
    scheduler.submit([Job(number, (1, 2), deadline=5.0, request=1) for number in (1, 2)])
    scheduler.plan(0.0, 8)
    scheduler.computed()
    if goes_on:
        scheduler.extend(1, 9)
    else:
        scheduler.finish(1)
    assert scheduler.plan(5.0, 8).expired == ()


def test_waiting_choices_share_one_prompt() -> None:
    """Hundreds can wait, and a prompt of a long context needs half a megabyte."""
    scheduler = Scheduler(Limits(slots=1, context=100_001, batch=8, queue=99))
    prompt = array("i", bytes(400_000))
    tracemalloc.start()
    try:
        assert scheduler.submit([Job(number, prompt, group=0) for number in range(100)])
        scheduler.plan(0.0, 8)
        _now, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 400_000 < most < 1_000_000, "a running job has its own copy"
    scheduler.computed()
    scheduler.extend(0, 9)
    scheduler.abort(0)
    scheduler.plan(0.0, 8)
    assert len(prompt) == 100_000, "generated tokens are in the copy only"


LIMITS = Limits(slots=2, context=20, batch=8, queue=2)


@pytest.mark.parametrize(
    "wrong",
    [{"slots": 0}, {"slots": 9}, {"min_copied": 0}, {"context": 0}, {"queue": -1}],
    ids=lambda wrong: str(wrong),
)
def test_invalid_limits_raise_value_error(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="invalid limits"):
        Limits(**{"slots": 2, "context": 20, "batch": 8, "queue": 2, **wrong})


@pytest.mark.parametrize("prompt", [(), (1,) * 21])
def test_job_with_invalid_prompt_length_raises_value_error(prompt: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="is invalid"):
        Scheduler(LIMITS).submit([Job(1, prompt)])


def test_empty_stop_string_is_rejected() -> None:
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
    """With an empty slot the retained sequence keeps its tail; without one its tail is dropped."""
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


def test_batch_has_room_for_a_prompt_beside_decoding_jobs() -> None:
    scheduler = Scheduler(Limits(slots=3, context=20, batch=3, queue=3))
    scheduler.submit([Job(1, (1,)), Job(2, (2,)), Job(3, (3, 3, 3))])
    assert [(row.job, len(row.tokens)) for row in scheduler.plan(0.0, 8).rows] == [(1, 1), (2, 1), (3, 1)]


def test_number_of_prompt_tokens_follows_the_time_of_steps() -> None:
    def settle(factor: float) -> int:
        nonlocal pace
        for _ in range(10):
            budget = pace.budget(STEP_SECONDS)
            pace = pace.observe(budget, budget, STEP_SECONDS * factor, STEP_SECONDS, decoding=0, prompts=1)
        return pace.budget(STEP_SECONDS)

    pace = Pace.first(2048)
    assert settle(1 / 4) == 2048
    assert settle(9) == MIN_STEP_TOKENS
    settled = Pace(2048, 1000)

    def after(prompt_tokens: int, seconds: float) -> Pace:
        return settled.observe(prompt_tokens, prompt_tokens, seconds, STEP_SECONDS, decoding=0, prompts=1)

    assert after(1000, STEP_SECONDS) == settled
    assert after(0, 100.0) == settled, "a step without prefill is not measured"
    assert after(1, STEP_SECONDS / 2) == settled, "nor a short one with few prompt tokens"
    assert after(400, STEP_SECONDS / 20) == Pace(2048, 2000), "unless they are cheaper than known"
    assert after(800, STEP_SECONDS * 2).tokens == 400, "a step that was too long is measured"
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
    for times in (1, 2, LARGEST_DISCOUNT):
        assert settled(TOKEN_SECONDS * times).budget(STEP_SECONDS) == STEP_SECONDS / TOKEN_SECONDS
    assert settled(TOKEN_SECONDS * LARGEST_DISCOUNT * 2).budget(STEP_SECONDS) == STEP_SECONDS / TOKEN_SECONDS / 2
    slow = settled(TOKEN_SECONDS * 4).observe(100, 100, 0.8, STEP_SECONDS, decoding=1, prompts=1)
    assert slow.credit_seconds == pytest.approx(CREDIT_SECONDS + MIXED_SECONDS - 0.2), "it uses less of the credit"


def test_step_of_a_slow_model_is_not_considered_hung() -> None:
    """Including the time of streams in it."""
    longest = LARGEST_DISCOUNT * LONGEST_SECONDS * (1 + 1 / LAST_PART)
    assert longest < 0.95 * HUNG_STEP_SECONDS
    assert DeadlineSettings().inter_token > HUNG_STEP_SECONDS


def test_few_streams_are_delayed_longer_for_many_prompts() -> None:
    pace = Pace(2048, 1000)
    assert pace.seconds(0, 1) == pace.seconds(0, 9) == LONGEST_SECONDS, "there is no stream to delay"
    assert pace.seconds(4, 1) == pace.seconds(4, 4) == STEP_SECONDS
    assert pace.seconds(4, 6) == pytest.approx(1.5 * STEP_SECONDS)
    assert pace.seconds(1, 31) == LONGEST_SECONDS
    assert pace.seconds(4, 1, just_begun=True) == LONGEST_SECONDS, "once, before they continue"
    assert Pace(2048, 1000, 0.0).seconds(4, 4, just_begun=True) == MIXED_SECONDS, "within the remaining credit"
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
    assert pace.credit_seconds < 0, "the last step used more than the rest of the credit"
    assert pace.budget(pace.seconds(1, 1)) == MIN_STEP_TOKENS, "the debt is paid back"
    for _ in range(9):
        pace = pace.observe(1000, 1000, 9.0, STEP_SECONDS, decoding=1, prompts=1)
    assert pace.credit_seconds == -DEBT_SECONDS, "the debt is limited"
    owing = Pace(2048, 1000, -DEBT_SECONDS)
    short = owing.observe(15, 19, 0.1, owing.seconds(4, 1), decoding=4, prompts=1)
    assert short.tokens == owing.tokens, "a short step is not measured, in debt either"
    pace = Pace(2048, pace.tokens, 0.0)
    assert pace.seconds(9, 9) == MIXED_SECONDS
    assert pace.seconds(2, 6) == pytest.approx(3 * MIXED_SECONDS), "more prompts wait than streams are delayed"
    for _ in range(4):
        pace = pace.observe(0, 1, 0.01, MIXED_SECONDS, decoding=1, prompts=1)
    assert pace.seconds(1, 1) == pytest.approx(STEP_SECONDS)
    drained = Pace(2048, 1000, 0.0)
    idle = drained.observe(0, 0, 0.01, STEP_SECONDS, decoding=0, prompts=1)
    assert idle.credit_seconds == CREDIT_SECONDS, "no stream was delayed"
    kept = drained.observe(200, 200, MIXED_SECONDS, MIXED_SECONDS, decoding=1, prompts=1)
    assert kept.credit_seconds == pytest.approx(0.0)


def test_rate_is_none_before_a_step_that_counts() -> None:
    assert TokenRate().tokens_per_second is None
    assert TokenRate().with_step(MIN_TOKENS - 1, 0.5).tokens_per_second is None
    assert TokenRate().with_step(500, 0.0).tokens_per_second is None
    assert TokenRate().with_step(500, 0.5).tokens_per_second == 1000


def test_older_steps_have_less_weight_and_leave_the_window() -> None:
    rate = TokenRate().with_step(1000, 1.0)
    for _ in range(200):
        rate = rate.with_step(100, 1.0)
    assert rate.tokens_per_second is not None
    assert abs(rate.tokens_per_second - 100) < 1
    assert rate.with_step(50, WINDOW_SECONDS * 2) == TokenRate(50, WINDOW_SECONDS * 2)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 60)), max_size=40))
def test_rate_stays_within_the_measured_rates(steps: list[tuple[int, float]]) -> None:
    rate = TokenRate()
    for tokens, seconds in steps:
        rate = rate.with_step(tokens, seconds)
    seen = [tokens / seconds for tokens, seconds in steps if tokens >= MIN_TOKENS and seconds > 0]
    found = rate.tokens_per_second
    assert (found is None) == (not seen)
    if found is not None:
        assert min(seen) * 0.999 <= found <= max(seen) * 1.001


FOUR_SLOTS = Limits(slots=4, context=64, batch=16, queue=8)


def _details(estimate: QueueEstimate, requested: int, room: int) -> dict[str, object]:
    return dict(estimate.queue_full(requested, room).body()["error"].get("headgate", {}))


def test_retry_after_is_none_before_a_sequence_ends() -> None:
    assert _details(QueueEstimate(FOUR_SLOTS), 1, 0) == {FULL_FOR: [*Priority]}


@pytest.mark.parametrize(
    ("requested", "room", "expected"),
    [
        (1, 0, {RETRY_AFTER: 1.0, FULL_FOR: [*Priority]}),
        (3, 0, {RETRY_AFTER: 2.0, FULL_FOR: [*Priority]}),
        (8, 4, {RETRY_AFTER: 2.0}),
        (13, 12, {}),
    ],
    ids=["one too many", "three too many", "more at once than free", "more at once than ever"],
)
def test_queue_is_full_for_all_priorities_only_without_room(
    requested: int, room: int, expected: dict[str, object]
) -> None:
    estimate = QueueEstimate(FOUR_SLOTS)
    estimate.observe(2.0)
    assert _details(estimate, requested, room) == expected


def test_message_of_a_full_queue_counts_free_slots_as_room() -> None:
    """Twelve sequences may run or wait; with the queue of eight alone there would be no room for ten."""
    error = QueueEstimate(FOUR_SLOTS).queue_full(11, 10)
    assert error.message == "the request needs 11 sequences; this model has room for 10 more, running and queued"


@pytest.mark.parametrize("steps", [0, 1], ids=["before the first step", "with all slots taken"])
@pytest.mark.parametrize("taken", range(13))
def test_queue_with_room_for_one_is_not_full_for_all_priorities(steps: int, taken: int) -> None:
    """Free slots take waiting jobs in the next step, so these jobs do not fill the queue."""
    scheduler = Scheduler(FOUR_SLOTS)
    assert scheduler.submit([Job(number, (1, 2)) for number in range(taken)])
    for _ in range(steps if taken else 0):
        scheduler.plan(0.0, 16)
    assert not scheduler.submit([Job(100 + number, (1, 2)) for number in range(scheduler.room + 1)])
    expected = _details(QueueEstimate(FOUR_SLOTS), min(12, scheduler.room + 1), scheduler.room)
    assert (FULL_FOR in expected) is not scheduler.submit([Job(200, (1, 2))])


def test_prompt_whose_checkpoint_is_rejected_is_computed_from_its_beginning() -> None:
    """The checkpoints are at the last two messages; the restored slot is emptied, and another job is not disturbed."""
    limits = Limits(
        slots=2, context=40, batch=30, queue=4, can_trim=False, min_copied=40, checkpoints=4, checkpoint_gap=2
    )
    scheduler = Scheduler(limits)
    scheduler.submit([Job(1, tuple(range(10)), message_starts=(0, 4, 8))])
    saved = []
    for _step in range(4):
        step = scheduler.plan(0.0, 30)
        for operation in step.operations:
            assert isinstance(operation, SaveCheckpoint)
            operation.checkpoint.state = b"state"
            saved.append(operation.checkpoint.position)
        scheduler.computed()
        if any(row.sample for row in step.rows):
            scheduler.extend(1, 50)
    assert saved == [4, 8, 10]
    scheduler.finish(1)
    scheduler.submit([Job(2, (0, 1, 2, 3, 4, 5, 6, 7, 8, 77, 78), message_starts=(0, 4, 8)), Job(3, (60, 61, 62))])
    step = scheduler.plan(0.0, 30)
    assert [type(operation) for operation in step.operations] == [RestoreCheckpoint]
    assert [(row.job, row.start) for row in step.rows] == [(2, 8), (3, 0)]
    scheduler.not_restored(
        [operation.slot for operation in step.operations if isinstance(operation, RestoreCheckpoint)]
    )
    step = scheduler.plan(0.0, 30)
    assert [(row.job, row.start, len(row.tokens)) for row in step.rows] == [(2, 0, 4), (3, 0, 2)]


def test_number_of_checkpoints_follows_from_their_size() -> None:
    """A model without windows and states has none."""
    assert max_checkpoints(0, 2**30) == 0
    assert max_checkpoints(100, 350) == 3
    assert max_checkpoints(1, 2**30) == 16


def test_dropped_request_leaves_no_tokens() -> None:
    scheduler = Scheduler(Limits(slots=1, context=64, batch=32, queue=2), Catalog())
    for number, hint, left in ((1, KvHint("drop"), 0), (2, KvHint("keep"), 5)):
        scheduler.submit([Job(number, (1, 2, 3, 4, 5), kv=hint)])
        rows_of(scheduler, 32)
        scheduler.finish(number)
        assert sum(slot.computed for slot in scheduler.slots.held()) == left
    (slot,) = scheduler.slots.held()
    operation = scheduler.slots.store(slot)
    assert operation is not None
    assert (list(operation.sequence.tokens), operation.sequence.hint) == ([1, 2, 3, 4, 5], KvHint("keep"))
    assert (scheduler.slots.hits.misses, scheduler.slots.hits.hot) == (2, 0)


def test_running_sequence_of_a_pool_gives_way_and_goes_on() -> None:
    """The shortest one, except for the oldest, is stored when the cells run out; it is loaded when there is room."""
    catalog = Catalog()
    limits = Limits(slots=2, context=20, batch=32, queue=2, cells=20, answer_cells=1)
    scheduler = Scheduler(limits, catalog)
    scheduler.submit([Job(1, tuple(range(10))), Job(2, tuple(range(20, 28)))])
    rows_of(scheduler, 32)
    scheduler.extend(1, 90)
    scheduler.extend(2, 91)
    rows_of(scheduler)  # 20 cells are in use
    scheduler.extend(1, 92)
    scheduler.extend(2, 93)
    step = scheduler.plan(0.0, 32)
    (store,) = [operation for operation in step.operations if isinstance(operation, Store)]
    assert list(store.sequence.tokens) == [*range(20, 28), 91]
    assert [row.job for row in step.rows] == [1]
    store.sequence.in_ram = True
    catalog.add(store.sequence)
    scheduler.computed()
    scheduler.finish(1)
    step = scheduler.plan(0.0, 32)
    assert any(isinstance(operation, Store) for operation in step.operations), "the first job is stored for its cells"
    step = scheduler.plan(0.0, 32) if not step.rows else step
    (load,) = [operation for operation in step.operations if isinstance(operation, Load)]
    assert load.sequence is store.sequence
    assert [(row.job, row.start, list(row.tokens)) for row in step.rows] == [(2, 9, [93])]


def test_copies_of_a_slot_that_could_not_be_loaded_are_lost() -> None:
    """Later operations of the slot are left out."""
    sequence = StoredSequence(array("i", [1, 2]), "")
    checkpoint = Checkpoint(1)
    operations = [
        Load(0, sequence),
        RestoreCheckpoint(0, checkpoint),
        Copy(0, 1, 1),
        SaveCheckpoint(0, checkpoint),
        Remove(2, 0),
    ]
    done: list[Operation] = []

    def perform(operation: Operation) -> bool:
        done.append(operation)
        return not isinstance(operation, Load)

    assert perform_all(operations, perform) == [0, 1]
    assert done == [operations[0], operations[4]]


def test_cells_for_a_stored_sequence_are_freed_one_transfer_per_step() -> None:
    catalog = Catalog()
    scheduler = Scheduler(Limits(slots=4, context=20, batch=32, queue=4, cells=20, answer_cells=1), catalog)
    scheduler.submit([Job(number, tuple(range(10 * number, 10 * number + 5))) for number in range(1, 5)])
    rows_of(scheduler, 32)
    for number in range(1, 5):
        scheduler.finish(number)
    stored = StoredSequence(array("i", range(100, 118)), "", in_ram=True)
    catalog.add(stored)
    scheduler.submit([Job(9, (*range(100, 118), 7))])
    transfers = []
    for _ in range(10):
        step = scheduler.plan(0.0, 32)
        moved = [item for item in step.operations if isinstance(item, Store | Load)]
        assert len(moved) <= 1
        transfers += [type(item) for item in moved]
        if step.rows:
            break
    assert transfers[:-1] == [Store] * (len(transfers) - 1)
    assert transfers[-1] is Load
    assert [(row.start, list(row.tokens)) for row in step.rows] == [(18, [7])]


def test_copy_that_does_not_fit_a_pool_waits_while_streams_go_on() -> None:
    """Without cells for it, the job continues in the slot of the prefix, whose tail is stored first."""
    catalog = Catalog()
    scheduler = Scheduler(
        Limits(slots=5, context=50, batch=64, queue=4, cells=50, answer_cells=1, min_copied=4), catalog
    )
    scheduler.submit([Job(1, (1, 2, 3)), Job(2, tuple(range(100, 120)))])
    rows_of(scheduler, 64)
    scheduler.finish(2)
    scheduler.extend(1, 9)
    stored = StoredSequence(array("i", range(200, 220)), "", in_ram=True)
    catalog.add(stored)
    scheduler.submit([Job(3, (*range(200, 220), 7)), Job(4, (*range(100, 110), 7))])
    step = scheduler.plan(0.0, 64)
    assert [type(item) for item in step.operations] == [Load]
    assert [(row.job, row.start) for row in step.rows] == [(1, 3), (3, 20)]
    scheduler.computed()
    scheduler.extend(1, 9)
    scheduler.extend(3, 9)
    step = scheduler.plan(0.0, 64)
    assert [type(item) for item in step.operations] == [Store, Remove]
    assert [(row.job, row.start) for row in step.rows] == [(1, 4), (4, 10), (3, 21)]


def test_copy_of_a_running_prefix_gets_cells_of_retained_ones() -> None:
    """They are stored first, one per step."""
    catalog = Catalog()
    scheduler = Scheduler(
        Limits(slots=4, context=45, batch=64, queue=4, cells=45, answer_cells=1, min_copied=4), catalog
    )
    scheduler.submit([Job(1, tuple(range(20))), Job(2, tuple(range(100, 110))), Job(3, tuple(range(120, 130)))])
    rows_of(scheduler, 64)
    scheduler.finish(2)
    scheduler.finish(3)
    scheduler.extend(1, 90)
    scheduler.submit([Job(4, (*range(19), 91))])
    steps = []
    for _ in range(2):
        step = scheduler.plan(0.0, 64)
        steps.append(([type(item) for item in step.operations], [(row.job, row.start) for row in step.rows]))
        scheduler.computed()
        scheduler.extend(1, 90)
    assert steps == [([Store, Remove], [(1, 20)]), ([Store, Remove, Copy], [(1, 21), (4, 19)])]


def test_occupied_is_the_share_of_slots_with_tokens() -> None:
    """A finished request leaves its tokens, so that its slot stays occupied."""
    scheduler = Scheduler(Limits(slots=4, context=40, batch=30, queue=4))
    assert scheduler.slots.occupied == 0.0
    scheduler.submit([Job(1, (1, 2, 3))])
    rows_of(scheduler)
    assert scheduler.slots.occupied == 0.25
    scheduler.finish(1)
    assert scheduler.slots.occupied == 0.25


@pytest.mark.parametrize(("transfers", "steps"), [(1, 4), (2, 2), (8, 1)])
def test_several_stored_sequences_are_loaded_at_once_if_no_stream_waits(transfers: int, steps: int) -> None:
    """`plan` gets the number of transfers that a step may have."""
    catalog = Catalog()
    scheduler = Scheduler(Limits(slots=4, context=40, batch=32, queue=4), catalog)
    for number in range(1, 5):
        catalog.add(StoredSequence(array("i", [number] * 20), "", in_ram=True))
    scheduler.submit([Job(number, (number,) * 21) for number in range(1, 5)])
    planned = 0
    while scheduler.active < 4:
        step = scheduler.plan(0.0, 32, transfers)
        assert sum(isinstance(item, Load) for item in step.operations) <= transfers
        scheduler.computed()
        for row in step.rows:
            scheduler.extend(row.job, 7)
        planned += 1
    assert planned == steps
