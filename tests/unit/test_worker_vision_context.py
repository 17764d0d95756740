"""A step with images becomes several batches: order, positions, sampled rows, and undoing a partial step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from inference.worker.backend import BatchRow, Decode, ImageTile
from inference.worker.engine.vision_context import VisionBackend
from inference.worker.steps import Row


@dataclass
class FakeContext:
    """Holds the positions of each sequence like llama.cpp, and rejects positions with gaps."""

    can_trim: bool = True
    fates: deque[Decode] = field(default_factory=deque)
    held: dict[int, list[int]] = field(default_factory=dict)
    calls: list[object] = field(default_factory=list)

    def remove(self, slot: int, start: int = 0) -> bool:
        if start and not self.can_trim:
            return False
        self.held[slot] = [at for at in self.held.get(slot, []) if at < start]
        return True

    def copy(self, source: int, target: int, count: int) -> None:
        self.held[target] = [at for at in self.held[source] if at < count]

    def logits(self, index: int) -> np.ndarray:
        return np.array([index])

    def decode(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
        if (fate := self.fates.popleft() if self.fates else Decode.OK) is not Decode.OK:
            return fate, []
        last, at = [], -1
        for row in rows:
            assert min(row.tokens) >= 0
            held = self.held.setdefault(row.slot, [])
            assert row.start > max(held) if held else row.start == 0, "positions must increase"
            held += range(row.start, row.start + len(row.tokens))
            at += len(row.tokens)
            last.append(at)
        self.calls.append([(row.slot, row.start, len(row.tokens), row.sample) for row in rows])
        return Decode.OK, last

    def decode_image(self, slot: int, positions: np.ndarray, rows: np.ndarray, *, non_causal: bool) -> Decode:
        if (fate := self.fates.popleft() if self.fates else Decode.OK) is not Decode.OK:
            return fate
        held = self.held.setdefault(slot, [])
        line = positions if positions.ndim == 1 else positions[0]  # cells have the first section
        assert int(line.min()) == (max(held) + 1 if held else 0)
        held += map(int, line)
        self.calls.append(("image", slot, positions.tolist(), non_causal))
        return Decode.OK


FLAT = ImageTile(3, 3, rows=np.zeros((3, 2), np.float32))
"""Tokens -1, -2, -3."""
FOLDED = ImageTile(
    4,
    2,
    non_causal=True,
    positions=np.array([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]], np.int32),
    moves=np.array([[1] * 4, [1] * 4, [1] * 4, [0] * 4], np.int32),
    rows=np.zeros((4, 2), np.float32),
)
"""Tokens -10 to -13: four cells, two positions."""
FLAT_TOKENS, FOLDED_TOKENS = [-1, -2, -3], [-10, -11, -12, -13]


@pytest.fixture
def context() -> FakeContext:
    return FakeContext()


@pytest.fixture
def backend(context: FakeContext) -> VisionBackend:
    return VisionBackend(context, 4, {-1: FLAT, -10: FOLDED})


def row(slot: int, start: int, tokens: list[int], sample: bool = True) -> Row:
    return Row(slot, slot, start, tokens, sample)


def test_text_only_step_is_passed_through(context: FakeContext, backend: VisionBackend) -> None:
    assert backend.decode([row(0, 0, [5, 6]), row(1, 0, [7])]) == (Decode.OK, [1, 2])
    assert context.calls == [[(0, 0, 2, True), (1, 0, 1, True)]]
    assert backend.logits(3) == 3


def test_sampled_rows_are_computed_last_in_one_batch(context: FakeContext, backend: VisionBackend) -> None:
    """A decoding row, a prompt with two images, and a row that ends in an image."""
    backend.decode([row(0, 0, [5])])
    context.calls.clear()
    step = [
        row(0, 1, [6]),
        row(1, 0, [7, *FLAT_TOKENS, 8, *FOLDED_TOKENS, 9, 9]),
        row(2, 0, [5, 5, *FLAT_TOKENS], sample=False),
    ]
    assert backend.decode(step) == (Decode.OK, [0, 2, -1])
    assert context.calls == [
        [(1, 0, 1, False), (2, 0, 2, False)],
        ("image", 1, [1, 2, 3], False),
        ("image", 2, [2, 3, 4], False),
        [(1, 4, 1, False)],
        ("image", 1, [[5, 5, 5, 5], [5, 5, 6, 6], [5, 6, 5, 6], [0, 0, 0, 0]], True),
        [(0, 1, 1, True), (1, 7, 2, True)],
    ]


def test_cells_are_converted_to_positions(context: FakeContext, backend: VisionBackend) -> None:
    """A folded image needs four cells and two positions; copies and removals count cells."""
    assert backend.decode([row(0, 0, [5, *FOLDED_TOKENS, 6])])[0] is Decode.OK
    backend.decode([row(0, 6, [7])])
    assert context.calls[-1] == [(0, 4, 1, True)]
    backend.copy(0, 1, 5)
    assert context.held[1] == [0, 1, 1, 1, 1]
    backend.decode([row(1, 5, [8])])
    assert context.calls[-1] == [(1, 3, 1, True)]
    backend.remove(0, 6)
    assert context.held[0] == [0, 1, 1, 1, 1, 3]
    backend.remove(0, 1)
    backend.decode([row(0, 1, [9])])
    assert context.calls[-1] == [(0, 1, 1, True)]


def test_step_with_images_only_has_no_logits(context: FakeContext, backend: VisionBackend) -> None:
    assert backend.decode([row(0, 0, FLAT_TOKENS, sample=False)]) == (Decode.OK, [-1])
    assert backend.decode([row(0, 3, FOLDED_TOKENS, sample=False)]) == (Decode.OK, [-1])
    assert context.held[0] == [0, 1, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("good", range(5))
def test_no_room_in_the_middle_restores_the_memory(good: int) -> None:
    """For each batch of the step that may fail; the step can be repeated."""
    context = FakeContext()
    backend = VisionBackend(context, 4, {-1: FLAT, -10: FOLDED})
    backend.decode([row(0, 0, [5, *FOLDED_TOKENS, 6])])
    before = list(context.held[0])
    step = [row(0, 6, [7]), row(1, 0, [7, *FOLDED_TOKENS, 8, *FLAT_TOKENS, 9])]
    context.fates = deque([Decode.OK] * good + [Decode.NO_ROOM])
    assert backend.decode(step) == (Decode.NO_ROOM, [])
    assert context.held == {0: before, 1: []}
    assert backend.decode(step) == (Decode.OK, [0, 1])
    assert context.calls[-1] == [(0, 4, 1, True), (1, 7, 1, True)]


def test_no_room_that_cannot_be_undone_is_a_failed_step() -> None:
    context = FakeContext(can_trim=False)
    backend = VisionBackend(context, 2, {-1: FLAT})
    backend.decode([row(0, 0, [5])])
    context.fates = deque([Decode.OK, Decode.NO_ROOM])
    assert backend.decode([row(0, 1, [6]), row(1, 0, [7, *FLAT_TOKENS, 8])]) == (Decode.COMPUTE_FAILED, [])
    context.fates = deque([Decode.COMPUTE_FAILED])
    assert backend.decode([row(1, 0, [*FLAT_TOKENS, 8])])[0] is Decode.COMPUTE_FAILED


def test_released_image_raises_key_error(backend: VisionBackend) -> None:
    with pytest.raises(KeyError, match="released before it was computed"):
        backend.decode([row(0, 0, [-99, 5])])
