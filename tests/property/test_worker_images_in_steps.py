"""Prompts with images through scheduler and context: no image is divided, no job starves, every job ends once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference.worker.backend import BatchRow, Decode, ImageTile
from inference.worker.engine.scheduler import Scheduler
from inference.worker.engine.vision_context import VisionBackend
from inference.worker.steps import Job, Limits, Remove

pytestmark = pytest.mark.unmeasured

LIMITS = Limits(slots=3, context=40, batch=16, queue=50)
LARGEST = LIMITS.batch - LIMITS.slots
CELLS_A_STEP = 400


class StrictContext:
    """Cells by sequence and position; too many tokens for a batch or gaps in positions are errors."""

    can_trim = True

    def __init__(self) -> None:
        self.ends = dict.fromkeys(range(LIMITS.slots), 0)

    def remove(self, slot: int, start: int = 0) -> bool:
        self.ends[slot] = min(self.ends[slot], start)
        return True

    def copy(self, source: int, target: int, count: int) -> None:
        assert count <= self.ends[source]
        self.ends[target] = count

    def logits(self, index: int) -> np.ndarray:
        return np.zeros(1)

    def decode(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
        assert sum(len(row.tokens) for row in rows) <= LIMITS.batch
        for row in rows:
            self._grow(row.slot, row.start, len(row.tokens))
        return Decode.OK, list(range(len(rows)))

    def decode_image(self, slot: int, positions: np.ndarray, rows: np.ndarray, *, non_causal: bool) -> Decode:
        assert len(rows) <= LIMITS.batch
        self._grow(slot, int(positions[0]), len(rows))
        return Decode.OK

    def _grow(self, slot: int, start: int, count: int) -> None:
        assert start == self.ends[slot], "positions have no gaps"
        self.ends[slot] += count


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Text and some of six images, which other prompts repeat; text is last."""
    sizes = (1, 2, 5, 8, LARGEST, LARGEST)
    tokens: list[int] = []
    for number in draw(st.lists(st.integers(-1, 5), max_size=6)):
        first = 1 + 20 * number
        tokens += [draw(st.integers(0, 2))] if number < 0 else range(-first, -first - sizes[number], -1)
    return [*tokens[: LIMITS.context - 5], 7] if _whole(tokens[: LIMITS.context - 5], sizes) else [7]


def _whole(tokens: list[int], sizes: Sequence[int]) -> bool:
    at = 0
    while at < len(tokens):
        if tokens[at] >= 0:
            at += 1
            continue
        size = sizes[(-tokens[at] - 1) // 20]
        if at + size > len(tokens):
            return False
        at += size
    return True


IMAGE = list(range(-81, -81 - LARGEST, -1))


@settings(max_examples=150, deadline=None)
@example([([7], 1), ([-1, -1, 0, *IMAGE, 7], 1), ([*IMAGE, 7], 1)], 12)  # an image uses the oldest prompt's part
@given(st.lists(st.tuples(prompts(), st.integers(1, 4)), min_size=1, max_size=12), st.integers(1, 20))
def test_all_jobs_end_and_no_image_is_divided(requests: list[tuple[list[int], int]], budget: int) -> None:
    sizes = (1, 2, 5, 8, LARGEST, LARGEST)
    pictures = {
        -(1 + 20 * number): ImageTile(size, size, rows=np.zeros((size, 2), np.float32))
        for number, size in enumerate(sizes)
    }
    context = StrictContext()
    backend = VisionBackend(context, LIMITS.slots, pictures)  # KeyError: an image was divided
    scheduler = Scheduler(LIMITS)
    left = {}
    for id, (prompt, length) in enumerate(requests):
        assert scheduler.submit([Job(id, prompt, arrival=float(id))])
        left[id] = length
    for _step in range(CELLS_A_STEP):
        if not left:
            break
        step = scheduler.plan(0.0, budget)
        for operation in step.operations:
            if isinstance(operation, Remove):
                backend.remove(operation.slot, operation.start)
            else:
                backend.copy(operation.source, operation.target, operation.count)
        if not step.rows:
            continue
        assert sum(len(row.tokens) for row in step.rows) <= LIMITS.batch
        assert backend.decode(step.rows)[0] is Decode.OK
        scheduler.computed()
        for row in step.rows:
            if row.sample:
                left[row.job] -= 1
                if left[row.job]:
                    scheduler.extend(row.job, 1)
                else:
                    del left[row.job]
                    scheduler.finish(row.job)
    assert not left, "a job starves"
