"""Turns sampling parameters into a llama.cpp sampler chain and logits into log probabilities; never validates."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from inference.worker.llama import Context, Model, Sampler
from inference.worker.requests import Sampling

_RANDOM_SEED = 0xFFFFFFFF
"""llama.cpp draws its own seed for this value."""

_METADATA = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repeat_penalty",
}


def defaults(metadata: Mapping[str, str]) -> dict[str, float]:
    """Sampling values that the GGUF recommends for itself."""
    found: dict[str, float] = {}
    for key, name in _METADATA.items():
        try:
            value = float(metadata[key])
        except (KeyError, ValueError):
            continue
        if math.isfinite(value):
            found[name] = value
    return found


def seed_of(sampling: Sampling, choice: int) -> int:
    """32-bit seed of one choice: the asked one plus its index, so that choices differ and runs repeat."""
    seed = secrets.randbits(32) if sampling.seed is None else (sampling.seed + choice) % (1 << 32)
    return seed if seed != _RANDOM_SEED else 0


class ChainSampler:
    """A request's sampler chain bound to a context. Order as in llama.cpp: bias, penalties, cuts, temperature, draw.

    Penalties look at generated tokens only, over the whole answer, as OpenAI defines them.
    """

    def __init__(self, model: Model, context: Context, sampling: Sampling, choice: int, span: int) -> None:
        """`span` is how many tokens the answer can have at most: how far penalties look back."""
        self._context = context
        self._chain = chain = Sampler()
        bias = list(sampling.logit_bias)
        if sampling.ignore_eos:
            bias += [(token, -math.inf) for token in model.end_tokens]
        if bias:
            chain.add_bias(model.n_vocab, bias)
        if sampling.repeat_penalty != 1.0 or sampling.frequency_penalty or sampling.presence_penalty:
            chain.add(
                "penalties",
                model.n_vocab,
                span,
                sampling.repeat_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
        if sampling.temperature == 0.0:
            chain.add("greedy")
            return
        if sampling.top_k > 0:
            chain.add("top_k", sampling.top_k)
        if sampling.typical_p < 1.0:
            chain.add("typical", sampling.typical_p, 1)
        if sampling.top_p < 1.0:
            chain.add("top_p", sampling.top_p, 1)
        if sampling.min_p > 0.0:
            chain.add("min_p", sampling.min_p, 1)
        chain.add("temp", sampling.temperature)
        chain.add("dist", seed_of(sampling, choice))

    def sample(self, index: int) -> int:
        """Draws and accepts the token after batch index `index`."""
        return self._chain.sample(self._context, index)

    def close(self) -> None:
        """Frees the chain."""
        self._chain.close()


@dataclass(frozen=True, slots=True)
class Distribution:
    """Log probabilities (natural) of all tokens at one position, before any sampling parameter changed them."""

    values: np.ndarray

    @classmethod
    def of(cls, logits: np.ndarray) -> Distribution:
        """From raw logits, in double precision so that the sum over a large vocabulary stays exact."""
        wide = logits.astype(np.float64)
        wide -= wide.max()
        wide -= np.log(np.exp(wide).sum())
        return cls(wide)

    def top(self, count: int) -> list[tuple[int, float]]:
        """The `count` likeliest tokens, likeliest first."""
        if count <= 0:
            return []
        count = min(count, len(self.values))
        best = np.argpartition(self.values, -count)[-count:]
        best = best[np.argsort(-self.values[best], kind="stable")]
        return [(int(token), float(self.values[token])) for token in best]
