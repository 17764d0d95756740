"""A fake model whose logits depend on the last two tokens only, its sampler, and the answers they give."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from inference.worker.backend import BatchRow, Decode
from inference.worker.engine.ngram_lookup import NgramSource
from inference.worker.engine.speculation import ProposalSource, Speculation
from inference.worker.steps import Candidate
from tests.rigs.fake_backend import END, FakeBackend

LETTERS = 6
"""The tokens of prompts and answers are the bytes below this, and END."""


@functools.cache
def logits_after(first: int, second: int) -> np.ndarray:
    """The logits behind two tokens: two letters are likely, so that texts repeat themselves."""
    chance = np.random.default_rng((first, second))
    logits = np.full(END + 1, -np.inf, np.float32)
    logits[:LETTERS] = chance.normal(0.0, 2.0, LETTERS)
    logits[END] = -2.0
    logits.setflags(write=False)
    return logits


@dataclass
class TableBackend(FakeBackend):
    """Computes `logits_after` for each token whose logits are needed; others may not be read."""

    outputs: list[np.ndarray | None] = field(default_factory=list)
    max_outputs: int = 1000

    def decode(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
        """Checks positions and outputs, and takes the tokens."""
        before = {row.slot: len(self.held[row.slot]) for row in rows}
        status, last = super().decode(rows)
        if status is Decode.OK:
            self.outputs = []
            for row in rows:
                text = self.held[row.slot]
                ends = range(before[row.slot] + 1, len(text) + 1)
                for end in ends:
                    wanted = row.every or (row.sample and end == len(text))
                    pair = [0, 0, *text[:end]][-2:]
                    self.outputs.append(logits_after(*pair) if wanted else None)
            assert sum(output is not None for output in self.outputs) <= self.max_outputs
        return status, last

    def logits(self, index: int) -> np.ndarray:
        """The logits after the token at a batch index."""
        found = self.outputs[index]
        assert found is not None, "these logits were not computed"
        return found


class TableSampler:
    """Draws with its own generator and penalizes the tokens drawn before; greedy with temperature 0."""

    def __init__(self, backend: TableBackend, seed: int, temperature: float) -> None:
        self._backend = backend
        self._chance = random.Random(seed)
        self._temperature = temperature
        self._counts = np.zeros(END + 1, np.float32)

    def sample(self, index: int) -> int:
        """Draws after the token at a batch index."""
        return self.draw(self._backend.logits(index))

    def draw(self, logits: np.ndarray) -> int:
        """Draws from logits."""
        changed = logits - 0.05 * self._counts
        if self._temperature == 0:
            token = int(changed.argmax())
        else:
            weights = np.exp((changed - changed.max()) / self._temperature).cumsum()
            token = int(weights.searchsorted(self._chance.random() * weights[-1], side="right"))
        self._counts[token] += 1
        return token

    def accept(self, tokens: Sequence[int]) -> None:
        """Unused."""

    def close(self) -> None:
        """Nothing is owned."""


def answer_of(prompt: Sequence[int], seed: int, temperature: float, most: int) -> list[int]:
    """The answer without speculation, of at most `most` tokens, with END if it comes."""
    sampler = TableSampler(TableBackend(), seed, temperature)
    text = [0, 0, *prompt]
    while len(text) - len(prompt) - 2 < most and text[-1] != END:
        text.append(sampler.draw(logits_after(*text[-2:])))
    return text[len(prompt) + 2 :]


class EagerSpeculation(Speculation):
    """Verifies all proposals that fit into a step, up to four of a source that takes time."""

    def __init__(self, source: ProposalSource | None = None) -> None:
        super().__init__(source or NgramSource())

    def propose(self, candidates: Sequence[Candidate], sequences: int) -> list[Sequence[int]]:
        """See `Speculation`."""
        most = 99 if self._source.is_free else 4
        return list(self._source.propose([item._replace(most=min(item.most, most)) for item in candidates]))
