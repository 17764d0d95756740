"""Proposes the next tokens of a sequence from what followed an earlier occurrence of its last tokens.

Code edits, JSON and quotes repeat parts of the prompt or of the answer. No second model is needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from inference.worker.steps import Candidate

MAX_REPLACED = 2
"""After up to this many wrong tokens the earlier text is followed further, as if they were replaced: a renamed
variable, or another value of a JSON key. Only one token is proposed then."""

_FACTORS = (0x9E3779B1, 0x85EBCA77)
"""Odd constants (of xxHash32) that distribute token ids over the table."""

_MIN_ENTRIES = 256

T = TypeVar("T", int, np.ndarray)


class NgramLookup:
    """The positions behind all pairs of tokens of one sequence, for one answer.

    The last two tokens must occur earlier: a single one matches by chance, and three match too late after a difference.
    A hash table keeps the last position of each pair, or of another pair with the same hash. It has at least one
    entry per token and is built again when it becomes too small, so that a token costs constant time on average.
    """

    def __init__(self) -> None:
        self._table = np.zeros(0, np.int32)
        self._mask = 0
        self._indexed = 0
        self._next = 0  # the place in the earlier text whose token is expected next; 0 for none
        self._wrong = 0  # tokens that differed since the last one that was as expected

    def propose(self, tokens: array[int], most: int) -> Sequence[int]:
        """At most `most` (1 or more) tokens that may follow `tokens`; empty if nothing like their end occurs earlier.

        `tokens` are those of the last call with more at their end. An earlier text is followed as long as it is right.
        A continuation that reaches the end of `tokens` repeats itself. The proposal ends before an image, whose tokens
        are negative.
        """
        count = len(tokens)
        if count > len(self._table):
            self._rebuild(tokens)
        for end in range(self._indexed, count):
            self._follow(tokens, end)
            if end >= 2:
                self._table[self._hash(tokens[end - 2], tokens[end - 1])] = end
        self._indexed = count
        if (self._wrong or not self._next) and (found := self._found(tokens)):
            self._next, self._wrong = found, 0
        if not self._next:
            return ()
        most = 1 if self._wrong else most
        proposed = list(tokens[self._next : self._next + most])
        while len(proposed) < most:
            proposed += proposed[: most - len(proposed)]
        return proposed[: next((at for at, token in enumerate(proposed) if token < 0), most)]

    def _follow(self, tokens: array[int], end: int) -> None:
        """Compares the token at `end` with the expected one."""
        if self._next:
            self._wrong = 0 if tokens[self._next] == tokens[end] else self._wrong + 1
            self._next += 1
            if self._wrong > MAX_REPLACED:
                self._next = self._wrong = 0

    def _found(self, tokens: array[int]) -> int:
        """The position behind an earlier occurrence of the last two tokens, 0 for none."""
        if len(tokens) < 2:
            return 0
        found = int(self._table[self._hash(tokens[-2], tokens[-1])])
        return found if tokens[max(0, found - 2) : found] == tokens[-2:] else 0

    def _hash(self, first: T, second: T) -> T:
        hashed: T = ((first * _FACTORS[0] + second * _FACTORS[1]) >> 8) & self._mask
        return hashed

    def _rebuild(self, tokens: array[int]) -> None:
        """Makes a table for twice as many tokens, with all pairs that end before the last token."""
        size = _MIN_ENTRIES
        while size < 2 * len(tokens):
            size *= 2
        self._table = np.zeros(size, np.int32)
        self._mask = size - 1
        known = np.frombuffer(tokens, np.int32).astype(np.int64)
        ends = np.arange(2, len(known))
        self._table[self._hash(known[ends - 2], known[ends - 1])] = ends
        self._indexed, self._next, self._wrong = len(known), 0, 0


class NgramSource:
    """Proposals of a lookup per job; see `ProposalSource`."""

    is_free = True
    seconds = 0.0

    def __init__(self) -> None:
        self._lookups: dict[int, NgramLookup] = {}

    def propose(self, candidates: Sequence[Candidate]) -> list[Sequence[int]]:
        """The proposals for each candidate."""
        found = []
        for job, _slot, tokens, most in candidates:
            if (lookup := self._lookups.get(job)) is None:
                lookup = self._lookups[job] = NgramLookup()
            found.append(lookup.propose(tokens, most))
        return found

    def behind(self, candidate: Candidate) -> int:
        """Nothing has to be computed."""
        return 0

    def removed(self, slot: int, start: int) -> None:
        """Nothing is kept by slot."""

    def end(self, job: int) -> None:
        """Forgets a job, which may be unknown."""
        self._lookups.pop(job, None)
