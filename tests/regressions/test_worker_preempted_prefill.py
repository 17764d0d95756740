"""A job preempted while it was still prefilling crashed the plan of the step that preempted it."""

from __future__ import annotations

from inference.worker.core.scheduler import Scheduler
from inference.worker.core.steps import Job, Limits


def test_a_prefilling_job_can_be_preempted_by_a_decoding_one() -> None:
    """The older job takes the last cell; the younger one waits and goes on when the older has ended."""
    scheduler = Scheduler(Limits(slots=2, cells=22, context=22, batch=4, queue=2))
    scheduler.submit([Job(1, (1,) * 4)])
    scheduler.plan(0.0, 4)
    scheduler.computed()
    scheduler.extend(1, 9)
    scheduler.submit([Job(2, (2,) * 12)])
    preempted = False
    for _step in range(16):
        step = scheduler.plan(0.0, 1)
        scheduler.computed()
        if 1 not in [row.job for row in step.rows]:
            break
        preempted = preempted or scheduler.queued == 1
        scheduler.extend(1, 9)
    assert preempted
    scheduler.finish(1)
    tokens = sum(len(row.tokens) for _ in range(12) for row in _advance(scheduler))
    assert tokens == 12


def _advance(scheduler: Scheduler) -> tuple:
    rows = scheduler.plan(0.0, 4).rows
    if rows:
        scheduler.computed()
        if rows[0].sample:
            scheduler.finish(2)
    return rows
