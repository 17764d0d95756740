"""An exception between a step's computation and its last token left jobs without anything to compute: they hung."""

from __future__ import annotations

from inference.worker.engine.scheduler import Scheduler
from inference.worker.steps import Job, Limits


def test_jobs_whose_token_was_never_reported_end_with_the_step() -> None:
    scheduler = Scheduler(Limits(slots=3, context=20, batch=8, queue=4))
    scheduler.submit([Job(1, (1,)), Job(2, (2,)), Job(3, (3,) * 12)])
    scheduler.plan(0.0, 8)
    scheduler.computed()
    scheduler.extend(1, 9)
    assert scheduler.failed() == (2,)
    assert {row.job for row in scheduler.plan(0.0, 8).rows} == {1, 3}
