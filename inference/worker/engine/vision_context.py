"""A context that also computes images: puts a step's text and images into batches of their own; never schedules.

The scheduler knows an image as a run of numbers below zero. llama.cpp takes a batch of tokens or one of embeddings, so
a step becomes several: what stands before and between images, each image, and last of all the ends of the rows, whose
logits are sampled. Where an image moves the text behind it by fewer positions than it has cells (M-RoPE), rows are
moved here; everybody else counts cells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from inference.worker.backend import OK, Backend, BatchRow, Decode, Picture


class PictureBackend(Backend, Protocol):
    """A context that takes embeddings too."""

    def decode_picture(self, slot: int, positions: np.ndarray, rows: np.ndarray, *, sees_all: bool) -> Decode:
        """Computes one image at `positions` (int32, sections by tokens) from its embeddings; no logits follow."""
        ...


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of text tokens of a row, or one image (`picture`); `start` counts cells."""

    slot: int
    start: int
    tokens: Sequence[int]
    sample: bool = False
    every: bool = False
    picture: Picture | None = None


@dataclass(frozen=True, slots=True)
class _Seen:
    """An image in a sequence: from cell `start` on, and by how many positions fewer than cells it moves the text."""

    start: int
    saved: int


class SightedBackend:
    """`Backend` over another one. `picture_of` finds the image that begins with a token."""

    def __init__(self, backend: PictureBackend, slots: int, picture_of: Callable[[int], Picture]) -> None:
        self.can_trim = backend.can_trim
        self._backend = backend
        self._picture_of = picture_of
        self._seen: list[tuple[_Seen, ...]] = [()] * slots

    def remove(self, slot: int, start: int = 0) -> bool:
        """Forgets the tokens of `slot` from cell `start` on."""
        done = self._backend.remove(slot, self._position(slot, start))
        self._seen[slot] = tuple(seen for seen in self._seen[slot] if seen.start < start)
        return done

    def copy(self, source: int, target: int, count: int) -> None:
        """Shares the first `count` cells of `source`."""
        self._backend.copy(source, target, self._position(source, count))
        self._seen[target] = tuple(seen for seen in self._seen[source] if seen.start < count)

    def logits(self, index: int) -> np.ndarray:
        """Logits at a batch index, valid until the next decode."""
        return self._backend.logits(index)

    def decode(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
        """Computes a step; returns the batch index of each row's last token, -1 for a row that ends in an image.

        When it fails half-way, what was computed of it is removed, so that NO_ROOM leaves the memory as it was.
        """
        parts = [self._parts(row) for row in rows]
        if all(len(of_row) == 1 and of_row[0].picture is None for of_row in parts):
            return self._backend.decode([self._moved(of_row[0]) for of_row in parts])
        before = {row.slot: self._seen[row.slot] for row in rows}
        status, last = self._compute(parts)
        if status is not OK:
            undone = [self.remove(row.slot, row.start) for row in rows]
            self._seen = [before.get(slot, seen) for slot, seen in enumerate(self._seen)]
            if status is Decode.NO_ROOM and not all(undone):
                status = Decode.COMPUTE_FAILED
        return status, last

    def _compute(self, parts: Sequence[Sequence[_Part]]) -> tuple[Decode, list[int]]:
        early = [of_row if of_row[-1].picture is not None else of_row[:-1] for of_row in parts]
        for turn in range(max(map(len, early))):
            now = [of_row[turn] for of_row in early if turn < len(of_row)]
            for part in now:
                if part.picture is not None and (status := self._look(part, part.picture)) is not OK:
                    return status, []
            if texts := [self._moved(part) for part in now if part.picture is None]:
                status, _last = self._backend.decode(texts)
                if status is not OK:
                    return status, []
        ends = [self._moved(of_row[-1]) for of_row in parts if of_row[-1].picture is None]
        if not ends:
            return OK, [-1] * len(parts)
        status, found = self._backend.decode(ends)
        if status is not OK:
            return status, []
        indices = iter(found)
        return status, [next(indices) if of_row[-1].picture is None else -1 for of_row in parts]

    def _look(self, part: _Part, picture: Picture) -> Decode:
        begins = self._position(part.slot, part.start)
        if picture.positions is None or picture.moves is None:
            positions = np.arange(begins, begins + picture.n_tokens, dtype=np.int32)
        else:
            positions = picture.positions + begins * picture.moves
        assert picture.rows is not None, "an image is encoded before its request is queued"
        status = self._backend.decode_picture(part.slot, positions, picture.rows, sees_all=picture.sees_all)
        saved = picture.n_tokens - picture.n_positions
        if status is OK and saved:
            self._seen[part.slot] = (*self._seen[part.slot], _Seen(part.start, saved))
        return status

    def _position(self, slot: int, cell: int) -> int:
        return cell - sum(seen.saved for seen in self._seen[slot] if seen.start < cell)

    def _moved(self, part: _Part) -> _Part:
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
            picture = self._picture_of(tokens[at])
            end = at + picture.n_tokens
            parts.append(_Part(row.slot, row.start + at, tokens[at:end], picture=picture))
            at = begin = end
        if begin < len(tokens):
            parts.append(_Part(row.slot, row.start + begin, tokens[begin:], row.sample, row.every))
        return parts


def picture_finder(pictures: Mapping[int, Picture]) -> Callable[[int], Picture]:
    """Looks images up by their first token; raises KeyError with a sentence for one that is not there."""

    def find(token: int) -> Picture:
        picture = pictures.get(token)
        if picture is None:
            raise KeyError("an image of this step is not there any more")
        return picture

    return find
