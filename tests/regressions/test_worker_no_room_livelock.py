"""A job preempted because llama.cpp found no cells was admitted again at once, and the next step had no room either.

By the scheduler's own count everything fitted, so that nobody moved for ever after.
"""

from __future__ import annotations

from inference.worker.engine.scheduler import Scheduler
from inference.worker.steps import Job, Limits


def test_a_job_preempted_for_want_of_cells_waits_until_somebody_has_left() -> None:
    scheduler = Scheduler(Limits(slots=3, context=20, batch=8, queue=4))
    scheduler.submit([Job(1, (1,) * 6), Job(2, (2,) * 6), Job(3, (3,) * 6)])
    left = dict.fromkeys((1, 2, 3), 4)
    steps = 0
    while left:
        step = scheduler.plan(0.0, 8)
        steps += 1
        assert steps < 40, "nobody moves"
        if sum(row.start + len(row.tokens) for row in step.rows) > 12:  # llama.cpp has fewer cells than it said
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
