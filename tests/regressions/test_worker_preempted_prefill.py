"""A job put back while it was still prefilling crashed the plan of the step that put it back."""

from __future__ import annotations

from inference.worker.engine.scheduler import Scheduler
from inference.worker.steps import Job, Limits


def test_a_prefilling_job_can_be_put_back() -> None:
    """The older job goes on; the younger one waits and computes all of its prompt when the older has ended."""
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
