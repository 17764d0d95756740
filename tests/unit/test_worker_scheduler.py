"""Single cases of the scheduler: scored prompts, suspended jobs, shared prefixes, limits and deadlines."""

from __future__ import annotations

import tracemalloc
from array import array

import pytest

from inference.worker.engine.scheduler import Scheduler
from inference.worker.steps import Copy, Job, Limits, Remove, Row


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


def given(prompts: list[int], budget: int, batch: int = 512, decoding: int = 0) -> list[int]:
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
    assert given([80, 80, 80, 80], 180) == [80, 80, 0, 0]
    assert given([80, 80, 80, 80], 200) == [80, 80, 80, 0], "with a quarter more the third is complete"
    assert given([80, 80, 80, 80], 320) == [80, 80, 80, 80]
    assert given([400, 80, 80, 80], 200) == [50, 80, 80, 0], "the oldest prompt has its share"


def test_long_prompt_takes_the_rest_of_the_budget_if_it_is_large() -> None:
    assert given([80, 1000], 160) == [80, 80]
    assert given([80, 1000], 159) == [80, 0]
    assert given([1000, 900], 100) == [25, 75]


def test_budget_is_exceeded_to_complete_a_prompt_within_the_batch() -> None:
    """A small rest would delay all streams for another step."""
    assert [given([length], 400, decoding=1) for length in (300, 401, 500, 501)] == [[300], [401], [500], [400]]
    assert given([460], 400, batch=450) == [400]


def test_budget_is_exceeded_by_half_to_complete_all_prompts() -> None:
    assert given([80] * 7, 374, batch=1000, decoding=1) == [80] * 7
    assert given([80] * 7, 373, batch=1000, decoding=1) == [80] * 5 + [0] * 2, "not all would be complete"
    assert given([80] * 4, 240, decoding=4) == [80] * 3 + [0], "as many streams would be delayed as prompts wait"
    assert given([80] * 7, 374, batch=561, decoding=1) == [80] * 7
    assert given([80] * 7, 374, batch=560, decoding=1) == [80] * 5 + [0] * 2, "the batch is full"


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
    scheduler = Scheduler(Limits(slots=3, context=30, batch=30, queue=4, copied=4))
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
    scheduler = Scheduler(Limits(slots=2, context=30, batch=30, queue=4, copied=4))
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


def after(order: str, copied: int = 2) -> Scheduler:
    """Five slots that retain prompts of four tokens, (10, 10, 10, 10) in slot 0 and so on, used in this order."""
    scheduler = Scheduler(Limits(slots=5, context=90, batch=90, queue=9, copied=copied))
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


def test_gap_is_filled_before_the_row_becomes_longer() -> None:
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
    little = after("20413", copied=5)
    little.submit([Job(10, (1, 1, 1)), Job(11, (2, 2, 2))])
    assert little.plan(0.0, 90).operations == (Remove(2, 0), Remove(1, 0))
    much = after("20413", copied=65)
    much.submit([Job(10, (1, 1, 1)), Job(11, (2, 2, 2))])
    assert [row.slot for row in much.plan(0.0, 90).rows] == [0, 2]


def test_forget_drops_retained_prefixes_only() -> None:
    scheduler = Scheduler(Limits(slots=2, context=20, batch=8, queue=4))
    scheduler.submit([Job(1, (1,) * 4), Job(2, (2,) * 4)])
    rows_of(scheduler)
    scheduler.finish(1)
    scheduler.forget()
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
