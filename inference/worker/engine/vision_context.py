"""A backend that also computes images: it splits a step into batches of text and batches of image embeddings.

The scheduler sees an image as a run of negative token numbers. A batch of llama.cpp holds tokens or embeddings, so a
step becomes several batches: text before and between images, each image, and finally the ends of the rows, whose
logits are sampled. With M-RoPE an image takes fewer positions than cells; this module converts cells to positions, all
other modules count cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inference.worker.backend import OK, BatchRow, Decode, ImageTile
from inference.worker.llama.context import Context


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of text tokens of a row, or one image (`tile`). `start` is a cell."""

    slot: int
    start: int
    tokens: Sequence[int]
    sample: bool = False
    every: bool = False
    tile: ImageTile | None = None


@dataclass(frozen=True, slots=True)
class _ImageOffset:
    """An image that starts at cell `start` of its sequence, and takes `saved` fewer positions than cells."""

    start: int
    saved: int


class VisionBackend:
    """A `Backend` that wraps another one. `tiles` are the images by their first token."""

    def __init__(self, backend: Context, slots: int, tiles: Mapping[int, ImageTile]) -> None:
        self.can_trim = backend.can_trim
        self._backend = backend
        self._tiles = tiles
        self._image_offsets: list[tuple[_ImageOffset, ...]] = [()] * slots

    def remove(self, slot: int, start: int = 0) -> bool:
        """Removes the tokens of `slot` from cell `start` on."""
        done = self._backend.remove(slot, self._position(slot, start))
        self._image_offsets[slot] = tuple(offset for offset in self._image_offsets[slot] if offset.start < start)
        return done

    def copy(self, source: int, target: int, count: int) -> None:
        """Copies the first `count` cells of `source` to `target`."""
        self._backend.copy(source, target, self._position(source, count))
        self._image_offsets[target] = tuple(offset for offset in self._image_offsets[source] if offset.start < count)

    def save(self, slot: int) -> Any:
        """See `Backend`."""
        return self._backend.save(slot)

    def restore(self, slot: int, state: Any, count: int) -> bool:
        """See `Backend`; `count` is in cells."""
        done = self._backend.restore(slot, state, self._position(slot, count))
        kept = count if done else 0
        self._image_offsets[slot] = tuple(offset for offset in self._image_offsets[slot] if offset.start < kept)
        return done

    def logits(self, index: int) -> np.ndarray:
        """Logits at a batch index, valid until the next decode."""
        return self._backend.logits(index)

    def decode(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
        """Computes a step; returns the batch index of each row's last token, -1 for a row that ends in an image.

        After a failure in the middle the computed cells are removed, so that NO_ROOM leaves the memory unchanged.
        """
        parts = [self._parts(row) for row in rows]
        if all(len(of_row) == 1 and of_row[0].tile is None for of_row in parts):
            return self._backend.decode([self._at_position(of_row[0]) for of_row in parts])
        before = {row.slot: self._image_offsets[row.slot] for row in rows}
        status, last = self._compute(parts)
        if status is not OK:
            undone = [self.remove(row.slot, row.start) for row in rows]
            self._image_offsets = [before.get(slot, offset) for slot, offset in enumerate(self._image_offsets)]
            if status is Decode.NO_ROOM and not all(undone):
                status = Decode.COMPUTE_FAILED
        return status, last

    def _compute(self, parts: Sequence[Sequence[_Part]]) -> tuple[Decode, list[int]]:
        early = [of_row if of_row[-1].tile is not None else of_row[:-1] for of_row in parts]
        for turn in range(max(map(len, early))):
            now = [of_row[turn] for of_row in early if turn < len(of_row)]
            for part in now:
                if part.tile is not None and (status := self._decode_image(part, part.tile)) is not OK:
                    return status, []
            if texts := [self._at_position(part) for part in now if part.tile is None]:
                status, _last = self._backend.decode(texts)
                if status is not OK:
                    return status, []
        ends = [self._at_position(of_row[-1]) for of_row in parts if of_row[-1].tile is None]
        if not ends:
            return OK, [-1] * len(parts)
        status, found = self._backend.decode(ends)
        if status is not OK:
            return status, []
        indices = iter(found)
        return status, [next(indices) if of_row[-1].tile is None else -1 for of_row in parts]

    def _decode_image(self, part: _Part, tile: ImageTile) -> Decode:
        begins = self._position(part.slot, part.start)
        if tile.positions is None or tile.moves is None:
            positions = np.arange(begins, begins + tile.n_tokens, dtype=np.int32)
        else:
            positions = tile.positions + begins * tile.moves
        assert tile.rows is not None, "an image is encoded before its request is queued"
        status = self._backend.decode_image(part.slot, positions, tile.rows, non_causal=tile.non_causal)
        saved = tile.n_tokens - tile.n_positions
        if status is OK and saved:
            self._image_offsets[part.slot] = (*self._image_offsets[part.slot], _ImageOffset(part.start, saved))
        return status

    def _position(self, slot: int, cell: int) -> int:
        return cell - sum(offset.saved for offset in self._image_offsets[slot] if offset.start < cell)

    def _at_position(self, part: _Part) -> _Part:
        """The part for llama.cpp: its `start` is a position instead of a cell."""
        start = self._position(part.slot, part.start)
        return part if start == part.start else _Part(part.slot, start, part.tokens, part.sample, part.every)

    def _parts(self, row: BatchRow) -> list[_Part]:
        tokens = row.tokens
        if len(tokens) == 1 or min(tokens) >= 0:
            return [_Part(row.slot, row.start, tokens, row.sample, row.every)]
        parts: list[_Part] = []
        at = begin = 0
        while at < len(tokens):
            if tokens[at] >= 0:
                at += 1
                continue
            if at > begin:
                parts.append(_Part(row.slot, row.start + begin, tokens[begin:at]))
            tile = self._tiles.get(tokens[at])
            if tile is None:
                raise KeyError("an image of this step was released before it was computed")
            end = at + tile.n_tokens
            parts.append(_Part(row.slot, row.start + at, tokens[at:end], tile=tile))
            at = begin = end
        if begin < len(tokens):
            parts.append(_Part(row.slot, row.start + begin, tokens[begin:], row.sample, row.every))
        return parts
