"""Finds stored sequences by the longest prefix that they share with a prompt."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from inference.worker.kv.labels import Labels
from inference.worker.steps import StoredSequence

MAX_CANDIDATES = 64
"""Sequences that `candidates` returns at most. Only those with the longest prefixes matter, and each costs a comparison
by the caller."""


def common_prefix(left: Sequence[int], right: Sequence[int], limit: int) -> int:
    """Length of the longest common prefix of two token lists, at most `limit`.

    A binary search that compares slices in C instead of single tokens.
    """
    low, high = 0, max(0, min(len(left), len(right), limit))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _tokens(sequence: StoredSequence) -> array[int]:
    return sequence.tokens


class Catalog:
    """The stored sequences of a model, sorted by their tokens for each tenant.

    In lexicographic order, the sequences that share the longest prefix with a prompt are neighbors of its place.
    """

    def __init__(self) -> None:
        self.labels = Labels()
        """Of these sequences, and of those in slots."""
        self._of: dict[str, list[StoredSequence]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[StoredSequence]:
        for sequences in self._of.values():
            yield from sequences

    def add(self, sequence: StoredSequence) -> None:
        """Adds a sequence. One with the same tokens and tenant must be removed before."""
        insort(self._of.setdefault(sequence.tenant, []), sequence, key=_tokens)
        self._count += 1
        self.labels.add(sequence.labels)

    def remove(self, sequence: StoredSequence) -> None:
        """Removes a sequence; one that is not in the catalog is ignored."""
        sequences = self._of.get(sequence.tenant, [])
        at = bisect_left(sequences, sequence.tokens, key=_tokens)
        if at < len(sequences) and sequences[at] is sequence:
            del sequences[at]
            self._count -= 1
            self.labels.remove(sequence.labels)

    def same(self, tokens: array[int], tenant: str) -> StoredSequence | None:
        """The sequence with exactly these tokens, or None."""
        sequences = self._of.get(tenant, [])
        at = bisect_left(sequences, tokens, key=_tokens)
        return sequences[at] if at < len(sequences) and sequences[at].tokens == tokens else None

    def candidates(self, tokens: array[int], tenant: str, limit: int) -> Iterator[tuple[StoredSequence, int]]:
        """The sequences that share the most tokens with `tokens`, with the length of that prefix, at most `limit`.

        The longest prefixes come first. Sequences without a common prefix are left out.
        """
        sequences = self._of.get(tenant, [])
        after = bisect_left(sequences, tokens, key=_tokens)
        before = after - 1

        def shared(at: int) -> int:
            return common_prefix(sequences[at].tokens, tokens, limit) if 0 <= at < len(sequences) else 0

        left, right = shared(before), shared(after)
        for _ in range(MAX_CANDIDATES):
            if not left and not right:
                return
            if left >= right:
                yield sequences[before], left
                before -= 1
                left = shared(before)
            else:
                yield sequences[after], right
                after += 1
                right = shared(after)
