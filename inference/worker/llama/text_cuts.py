"""Decides where a long text can be cut without changing its tokens.

llama.cpp first divides a text at the texts of special tokens and tokenizes the parts separately, so a cut before such a
text does not change the result. The time for this division grows with the square of the number of special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


class Cutter:
    """Cuts before the texts in `cuttable`. `atoms` are all texts at which llama.cpp divides, including `cuttable`."""

    def __init__(self, cuttable: Iterable[str], atoms: Iterable[str], size: int) -> None:
        """`size`: minimum length of a part, in characters."""
        longest_first = sorted((text for text in cuttable if text), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._atoms = frozenset(atoms)
        self._lengths = sorted({len(text) for text in self._atoms})
        self._size = size

    def parts(self, text: str) -> list[str]:
        """The parts of `text`, which joined are equal to it."""
        found: list[str] = []
        start, search_from = 0, self._size
        while self._pattern is not None and (match := self._pattern.search(text, search_from)) is not None:
            at = match.start()
            if self._is_inside_another(text, at, start):
                search_from = at + 1
                continue
            found.append(text[start:at])
            start, search_from = at, at + self._size
        return [*found, text[start:]]

    def _is_inside_another(self, text: str, at: int, start: int) -> bool:
        """Whether an atom starts before `at` and ends after it; llama.cpp might divide at that atom."""
        return any(
            text[begin : begin + length] in self._atoms
            for length in self._lengths
            for begin in range(max(start, at - length + 1), at)
        )
