"""When a worker counts as hung, and when it is only slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inference.workers.hang_detection import Life, Patience

PATIENCE = Patience(start_seconds=5, load_seconds=50, silence_seconds=3, step_seconds=10, step_seconds_per_token=1)
NEW = Life(greeted=False, ready=False, age_seconds=4, silent_seconds=4)
LOADING = Life(greeted=True, ready=False, age_seconds=49, silent_seconds=2)
READY = Life(greeted=True, ready=True, age_seconds=999, silent_seconds=2)
STEPPING = replace(READY, step_seconds=14.0, step_tokens=5)


@pytest.mark.parametrize(
    ("life", "said"),
    [
        (NEW, None),
        (replace(NEW, age_seconds=6), "no sign of life within 6 s"),
        (LOADING, None),
        (replace(LOADING, silent_seconds=4), "silent for 4 s"),
        (replace(LOADING, age_seconds=51), "not loaded within 51 s"),
        (READY, None),
        (replace(READY, silent_seconds=4), "silent for 4 s"),
        (STEPPING, None),
        (replace(STEPPING, step_seconds=16.0), "a step of 5 tokens takes longer than 15 s"),
        (replace(STEPPING, step_seconds=59.0, first_step=True), None),
        (replace(STEPPING, step_seconds=61.0, first_step=True), "longer than 60 s"),
    ],
)
def test_what_is_said_of_a_worker(life: Life, said: str | None) -> None:
    complaint = PATIENCE.complaint(life)
    assert (complaint is None) if said is None else (complaint is not None and said in complaint)
