"""Which labels of prompts the sequences of a model have.

A label is a hash of the beginning of a prompt, which the gateway gives. A sequence has a label as long as it has all
tokens of the prompt that came with the label.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

MAX_LABELS = 2048
"""Labels of one model. Beyond that the oldest ones are forgotten."""
MAX_OF_A_SEQUENCE = 128
"""Labels of one sequence. Beyond that those of the shortest beginnings are dropped."""


def with_labels(labels: Mapping[str, int], more: Iterable[str], tokens: int) -> Mapping[str, int]:
    """The labels of a sequence after a prompt with `tokens` tokens and the labels `more`.

    Each label has the number of tokens of the first prompt that came with it.
    """
    merged = {**labels, **{label: labels.get(label, tokens) for label in more}}
    return dict(list(merged.items())[-MAX_OF_A_SEQUENCE:])


class Labels:
    """The labels of all sequences, the oldest first, and what has changed. `add` and `remove` count sequences."""

    def __init__(self, max_labels: int = MAX_LABELS) -> None:
        self._max_labels = max_labels
        self._counts: dict[str, int] = {}
        self._before: dict[str, bool] = {}
        """Whether a label was there at the last `take_changes`; only those that have been added or removed since."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, labels: Iterable[str]) -> None:
        """A sequence has these labels."""
        for label in labels:
            if (count := self._counts.get(label, 0)) == 0:
                self._before.setdefault(label, False)
            self._counts[label] = count + 1
        while len(self._counts) > self._max_labels:
            self._drop(next(iter(self._counts)))

    def remove(self, labels: Iterable[str]) -> None:
        """A sequence has lost these labels. Those that were forgotten are ignored."""
        for label in labels:
            count = self._counts.get(label, 0)
            if count > 1:
                self._counts[label] = count - 1
            elif count == 1:
                self._drop(label)

    def _drop(self, label: str) -> None:
        del self._counts[label]
        self._before.setdefault(label, True)

    def take_changes(self) -> tuple[list[str], list[str]]:
        """The labels that were added and those that were removed since the last call."""
        if not self._before:
            return [], []
        before, self._before = self._before, {}
        added = [label for label, was in before.items() if not was and label in self._counts]
        removed = [label for label, was in before.items() if was and label not in self._counts]
        return added, removed
