"""Scheduler: preempted jobs, choices that wait, failed steps."""

from __future__ import annotations

from inference.worker.engine.scheduler import Scheduler
from inference.worker.steps import Job, Limits


def test_job_preempted_for_lack_of_cells_waits_until_another_job_ends() -> None:
    scheduler = Scheduler(Limits(slots=3, context=20, batch=8, queue=4))
    scheduler.submit([Job(1, (1,) * 6), Job(2, (2,) * 6), Job(3, (3,) * 6)])
    left = dict.fromkeys((1, 2, 3), 4)
    steps = 0
    while left:
        step = scheduler.plan(0.0, 8)
        steps += 1
        assert steps < 40, "no job makes progress"
        if sum(row.start + len(row.tokens) for row in step.rows) > 12:  # llama.cpp has fewer cells than it reported
            assert scheduler.no_room() == ()
            continue
        scheduler.computed()
        for row in [row for row in step.rows if row.sample]:
            left[row.job] -= 1
            if left[row.job]:
                scheduler.extend(row.job, 9)
            else:
                scheduler.finish(row.job)
                del left[row.job]


def test_choices_that_wait_for_a_shared_prompt_keep_their_slot() -> None:
    scheduler = Scheduler(Limits(slots=2, context=20, batch=8, queue=4))
    scheduler.submit([Job(1, (1,) * 12, group=1), Job(2, (1,) * 12, group=1)])
    scheduler.submit([Job(3, (3,))])
    for _ in range(2):
        assert {row.job for row in scheduler.plan(0.0, 8).rows} == {1}
        scheduler.computed()
    scheduler.extend(1, 9)
    assert {row.job for row in scheduler.plan(0.0, 8).rows} == {1, 2}


def test_job_can_be_preempted_during_its_prefill() -> None:
    """The older job continues; the younger one computes its whole prompt after the older one has ended."""
    scheduler = Scheduler(Limits(slots=2, context=22, batch=4, queue=2))
    scheduler.submit([Job(1, (1,) * 4)])
    scheduler.plan(0.0, 4)
    scheduler.computed()
    scheduler.extend(1, 9)
    scheduler.submit([Job(2, (2,) * 12)])
    scheduler.plan(0.0, 1)
    scheduler.computed()
    scheduler.extend(1, 9)
    assert {row.job for row in scheduler.plan(0.0, 1).rows} == {1, 2}
    assert scheduler.no_room() == ()
    assert [row.job for row in scheduler.plan(0.0, 1).rows] == [1]
    scheduler.computed()
    scheduler.finish(1)
    tokens = []
    while not tokens or not tokens[-1].sample:
        tokens += scheduler.plan(0.0, 4).rows
        scheduler.computed()
    assert [(row.job, row.start, len(row.tokens)) for row in tokens] == [(2, 0, 4), (2, 4, 4), (2, 8, 4)]


def test_job_without_a_reported_token_fails_with_its_step() -> None:
    scheduler = Scheduler(Limits(slots=3, context=20, batch=8, queue=4))
    scheduler.submit([Job(1, (1,)), Job(2, (2,)), Job(3, (3,) * 12)])
    scheduler.plan(0.0, 8)
    scheduler.computed()
    scheduler.extend(1, 9)
    assert scheduler.failed() == (2,)
    assert {row.job for row in scheduler.plan(0.0, 8).rows} == {1, 3}
