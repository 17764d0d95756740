"""While the first choice of a request computed its prompt, later requests took the slots of its other choices."""

from __future__ import annotations

from inference.worker.engine.scheduler import Scheduler
from inference.worker.steps import Job, Limits


def test_choices_that_wait_for_their_prompt_keep_their_place() -> None:
    scheduler = Scheduler(Limits(slots=2, context=20, batch=8, queue=4))
    scheduler.submit([Job(1, (1,) * 12, group=1), Job(2, (1,) * 12, group=1)])
    scheduler.submit([Job(3, (3,))])
    for _ in range(2):
        assert {row.job for row in scheduler.plan(0.0, 8).rows} == {1}
        scheduler.computed()
    scheduler.extend(1, 9)
    assert {row.job for row in scheduler.plan(0.0, 8).rows} == {1, 2}
