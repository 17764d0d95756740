"""Collects the log probabilities of a prompt while it is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from inference.worker.answers.generation import Detokenizer, TokenLogprob
from inference.worker.backend import Vocabulary
from inference.worker.sampling.sampling import Distribution


class Scoring:
    """One prompt, on the engine's thread. What is computed twice (after a preemption) is scored once.

    Pieces are those of `special=True`, and offsets count characters of the text that they join to.
    """

    def __init__(self, prompt: Sequence[int], vocabulary: Vocabulary, alternatives: int) -> None:
        self._prompt = prompt
        self._vocabulary = vocabulary
        self._alternatives = alternatives
        self._detokenizer = Detokenizer()
        self._decoded = 0
        self._scored = 0

    def add(self, start: int, count: int, logits_at: Callable[[int], np.ndarray]) -> tuple[TokenLogprob, ...]:
        """The scores from `count` computed tokens from position `start` on. The logits of a token score the next one.

        `logits_at(n)` are the logits at the n-th of them. The first token of the prompt has no log probability.
        """
        found = []
        if self._scored == 0:
            found.append(self._entry(self._prompt[0], None))
            self._scored = 1
        for position in range(start, min(start + count, len(self._prompt) - 1)):
            if position + 1 == self._scored:
                found.append(self._entry(self._prompt[position + 1], Distribution.of(logits_at(position - start))))
                self._scored += 1
        return tuple(found)

    def _entry(self, token: int, drawn: Distribution | None) -> TokenLogprob:
        vocabulary = self._vocabulary
        piece = vocabulary.piece(token, special=True)
        offset = self._decoded
        self._decoded += len(self._detokenizer.push(piece))
        if drawn is None:
            return TokenLogprob(piece, None, (), offset)
        best = drawn.top(self._alternatives)
        top = tuple((vocabulary.piece(other, special=True), value) for other, value in best)
        return TokenLogprob(piece, drawn.logprob(token), top, offset)
