"""An image encoder that hung showed in the heartbeat only between two steps of an engine that was busy."""

from __future__ import annotations

import pytest

from inference.worker.service import longer
from inference.worker_link import Heartbeat

BUSY = Heartbeat(step_seconds=0.01, step_tokens=4, active=2, queued=1, prompt_tokens=7, generated_tokens=9)


@pytest.mark.parametrize(
    ("engine", "eye", "shown"),
    [(0.01, 50.0, (50.0, 64)), (None, 50.0, (50.0, 64)), (9.0, 0.5, (9.0, 4)), (9.0, None, (9.0, 4))],
)
def test_the_longer_of_two_running_steps_is_told(
    engine: float | None, eye: float | None, shown: tuple[float, int]
) -> None:
    beat = Heartbeat(engine, 4, BUSY.active, BUSY.queued, BUSY.prompt_tokens, BUSY.generated_tokens)
    told = longer(beat, Heartbeat(eye, 64, 0, 0, 0, 0))
    assert (told.step_seconds, told.step_tokens) == shown
    assert (told.active, told.queued, told.prompt_tokens, told.generated_tokens) == (2, 1, 7, 9)


def test_two_that_rest_are_no_step() -> None:
    rest = Heartbeat(None, 0, 0, 0, 0, 0)
    assert longer(rest, rest) == rest
