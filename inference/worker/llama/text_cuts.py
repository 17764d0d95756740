"""Decides where a long text may be cut so that its parts tokenize as the whole would; never tokenizes.

llama.cpp first divides a text at the texts of special tokens and tokenizes what lies between them apart, so a cut right
before such a text changes nothing. Its division takes time that grows with the square of their number in one call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


class Cutter:
    """Cuts before the texts in `cuttable`; `atoms` are all texts that llama.cpp divides at, those included."""

    def __init__(self, cuttable: Iterable[str], atoms: Iterable[str], size: int) -> None:
        """`size` is the least length of a part, in characters."""
        longest_first = sorted((text for text in cuttable if text), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._atoms = frozenset(atoms)
        self._lengths = sorted({len(text) for text in self._atoms})
        self._size = size

    def parts(self, text: str) -> list[str]:
        """The parts of `text`; joined they are `text`."""
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
        """Whether an atom begins before `at` and ends after it: it might be the one that llama.cpp finds."""
        return any(
            text[begin : begin + length] in self._atoms
            for length in self._lengths
            for begin in range(max(start, at - length + 1), at)
        )
