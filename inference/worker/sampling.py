"""Draws tokens with llama.cpp sampler chains, within constraints, and computes log probabilities from logits."""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Mapping, Sequence

import numpy as np

from headgate.shared.parameters import Sampling
from inference.worker.backend import Backend, Mask, TokenSampler
from inference.worker.llama import MAX_CANDIDATES, MIN_LOGIT, Context, Dry, Model, Sampler
from inference.worker.worker_errors import ConstraintError

_RANDOM_SEED = 0xFFFFFFFF
"""llama.cpp draws its own seed for this value."""

COLDEST = 1e-4
"""The lowest temperature that is not greedy."""

_VANISHING = 1e-30
"""Share of the likeliest token's probability below which a token is dropped before locally typical sampling, whose
entropy would not be a number with a probability of zero."""

_NEGLIGIBLE = 1e-8
"""Share of the likeliest token's probability below which a token is dropped before Mirostat, which sorts all others.
Sorting 144,000 tokens takes 8 ms, and nearly all tokens of a vocabulary are below this share."""

_MARGIN = 1e-3
"""Added to a distance, so that rounding drops no token that the chain would keep."""

_LARGE_VOCABULARY = 2**13
"""With fewer tokens llama.cpp samples faster than the search."""

_NEAR = 8.0
"""Distance below the best logit that a top_k cut seldom exceeds."""

_ATTEMPTS = 8
"""The search ends when this many more attempts failed than succeeded. An attempt costs a seventh of a full sampling."""

_MIROSTAT_TOKENS = 100
"""Number of the likeliest tokens from which Mirostat 1 estimates the distribution, as in llama.cpp's server."""

_METADATA = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repeat_penalty",
}


def defaults(metadata: Mapping[str, str]) -> dict[str, float]:
    """The sampling parameters that a GGUF file recommends, from its metadata. Invalid values are left out."""
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
    """32-bit seed of a choice: random, or the requested seed plus its index, so that choices differ and runs repeat."""
    seed = secrets.randbits(32) if sampling.seed is None else (sampling.seed + choice) % (1 << 32)
    return seed if seed != _RANDOM_SEED else 0


def dry_of(sampling: Sampling, context: Context) -> Dry | None:
    """The settings of DRY, None where it is off. DRY looks back at most over the context of a sequence."""
    last_n = sampling.dry_penalty_last_n
    if sampling.dry_multiplier <= 0.0 or last_n == 0:
        return None
    return Dry(
        sampling.dry_multiplier,
        sampling.dry_base,
        sampling.dry_allowed_length,
        context.n_ctx_seq if last_n < 0 else min(last_n, context.n_ctx_seq),
        sampling.dry_sequence_breakers,
    )


class NoTokenAllowedError(ArithmeticError):
    """The logits of all tokens are minus infinity: a mask and the parameters together exclude every token."""


class Penalties:
    """Repeat, frequency and presence penalties of the tokens of one answer, as llama.cpp computes them.

    Computed here, because llama.cpp's chain would process the whole vocabulary: 0.5 ms per token with 128,000 tokens.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._repeat = np.float32(sampling.repeat_penalty)
        self._frequency = np.float32(sampling.frequency_penalty)
        self._presence = np.float32(sampling.presence_penalty)
        self._places: dict[int, int] = {}
        self._tokens = np.empty(0, np.intp)
        self._counts = np.empty(0, np.float32)

    @property
    def tokens(self) -> np.ndarray:
        """The distinct tokens of the answer, in order of their first use."""
        return self._tokens[: len(self._places)]

    def count(self, token: int) -> None:
        """Adds a token of the answer."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(place + 16, np.intp)])
            self._counts = np.concatenate([self._counts, np.zeros(place + 16, np.float32)])
        self._tokens[place] = token
        self._counts[place] += 1

    def applied(self, logits: np.ndarray) -> np.ndarray:
        """`logits`, those of `tokens`, with their penalties. Tokens at -inf stay there; no other gets there."""
        with np.errstate(over="ignore"):
            changed = np.where(logits <= 0, logits * self._repeat, logits / self._repeat)
            changed -= self._counts[: len(logits)] * self._frequency + self._presence
        return np.where(logits > -np.inf, np.maximum(changed, MIN_LOGIT), logits)


class ChainSampler:
    """A request's sampler chain bound to a context. Order as in llama.cpp: bias, penalties, DRY, cuts, temperature,
    draw. Mirostat replaces the cuts and the draw.

    Bias and penalties change the logits of a few tokens in place while a token is drawn. If a sampler keeps few tokens
    (`top_k`, `min_p`), candidates are selected first, and only they pass through the chain, with the same result. If a
    sampler uses all logits, the whole vocabulary passes. Candidates are the tokens within a distance of the best logit.
    This distance is adapted when it gave too many or too few candidates: a flat distribution has thousands of them, a
    sharp one has one.

    DRY, XTC and Mirostat only see allowed tokens, because they could rank a forbidden token before an allowed one.

    Penalties and DRY count generated tokens only: penalties over the whole answer, as OpenAI defines them, and DRY over
    the last `dry_penalty_last_n`. Below `COLDEST` a temperature is greedy: dividing by it would overflow. Without DRY
    and XTC greedy sampling needs no chain.
    """

    def __init__(self, model: Model, context: Context, sampling: Sampling, choice: int) -> None:
        self._context = context
        self._sampling = sampling
        self._seed = seed_of(sampling, choice)
        self._n_vocab = model.n_vocab
        bias: dict[int, float] = {}
        for token, value in sampling.logit_bias:
            bias[token] = bias.get(token, 0.0) + value
        if sampling.ignore_eos:
            bias |= dict.fromkeys(model.end_tokens, -math.inf)
        self._biased = np.fromiter(bias, np.intp)
        self._bias = np.fromiter(bias.values(), np.float32)
        penalizes = sampling.repeat_penalty != 1.0 or sampling.frequency_penalty or sampling.presence_penalty
        self._penalties = Penalties(sampling) if penalizes else None
        self._is_greedy = sampling.temperature < COLDEST
        self._uses_xtc = sampling.xtc_probability > 0.0 and sampling.xtc_threshold <= 0.5
        self._mirostat = 0 if self._is_greedy else sampling.mirostat
        self._dry = dry_of(sampling, context)
        self._among_allowed = self._dry is not None or self._uses_xtc or self._mirostat > 0
        self._model = model
        self._ends = np.fromiter(sorted(model.end_tokens), np.intp)
        self._min_tokens = sampling.min_tokens
        self._drawn = 0
        self._takes_best = self._is_greedy and not self._among_allowed
        self._earlier_tokens: Sequence[int] = ()
        self._reach: float | None = None
        self._farthest = math.inf
        self._least = 0
        self._attempts = _ATTEMPTS
        sees_all = sampling.top_n_sigma > 0.0  # its standard deviation is that of all logits
        if not (self._is_greedy or self._among_allowed or sees_all) and model.n_vocab >= _LARGE_VOCABULARY:
            self._start_search(sampling)

    @functools.cached_property
    def _chain(self) -> Sampler:
        """Created for the first draw, because hundreds of requests may wait."""
        sampling, chain = self._sampling, Sampler()
        if self._mirostat:
            chain.add("temp", sampling.temperature).add("min_p", _NEGLIGIBLE, 1)
            surprise = (self._seed, sampling.mirostat_tau, sampling.mirostat_eta)
            if self._mirostat == 2:
                return chain.add("mirostat_v2", *surprise)
            return chain.add("mirostat", self._n_vocab, *surprise, _MIROSTAT_TOKENS)
        if self._is_greedy and not self._uses_xtc:
            return chain.add("greedy")
        if sampling.top_n_sigma > 0.0:
            chain.add("top_n_sigma", sampling.top_n_sigma)
        if sampling.top_k > 0:
            chain.add("top_k", sampling.top_k)
        if sampling.typical_p < 1.0:
            chain.add("min_p", _VANISHING, 1)
            chain.add("typical", sampling.typical_p, 1)
        if sampling.top_p < 1.0:
            chain.add("top_p", sampling.top_p, 1)
        if sampling.min_p > 0.0:
            chain.add("min_p", sampling.min_p, 1)
        if self._uses_xtc:
            chain.add("xtc", sampling.xtc_probability, sampling.xtc_threshold, 1, self._seed)
        if self._is_greedy:
            return chain.add("greedy")
        chain.add("temp", sampling.temperature)
        return chain.add("dist", self._seed)

    @functools.cached_property
    def _dry_chain(self) -> Sampler | None:
        """DRY, separate from `_chain` because logits are made finite between them."""
        if self._dry is None:
            return None
        chain = Sampler().add_part(self._model.dry.sampler(self._dry))
        for token in self._earlier_tokens:
            chain.accept(token)
        return chain

    def _start_search(self, sampling: Sampling) -> None:
        """Sets the first and the maximum distance below the best logit, and the number of tokens that must be found."""
        if sampling.min_p > 0.0 and sampling.top_p == 1.0 and sampling.typical_p == 1.0:
            self._reach = self._farthest = _MARGIN - math.log(sampling.min_p)
        elif sampling.top_k > 0:
            self._reach = _NEAR
        self._least = sampling.top_k if sampling.top_k > 0 else MAX_CANDIDATES + 1

    def _adapt_search(self, found: int) -> None:
        """Adapts the distance: smaller after too many tokens, larger after too few. Their number grows about
        exponentially with the distance.
        """
        assert self._reach is not None
        self._attempts -= 1
        if self._attempts == 0 or (found > MAX_CANDIDATES and self._least > MAX_CANDIDATES):
            self._reach = None
        else:
            aim = math.sqrt(self._least * MAX_CANDIDATES)
            self._reach = min(self._reach * math.log(aim) / math.log(max(found, 2)), 2 * self._reach, self._farthest)

    def sample(self, index: int) -> int:
        """Draws and accepts the token after batch index `index`.

        Afterwards bias and penalties are undone; end tokens that `min_tokens` forbids stay forbidden. Raises
        NoTokenAllowedError, and ArithmeticError for logits that are not finite, with which llama.cpp's sorting may end
        the process.
        """
        logits = self._context.logits(index)
        if self._drawn < self._min_tokens:
            self._rule_out_ends(logits)
        self._drawn += 1
        unbiased = logits[self._biased]
        logits[self._biased] += self._bias
        try:
            return self._draw(logits, index) if self._penalties is None else self._penalized(logits, index)
        finally:
            logits[self._biased] = unbiased

    def _penalized(self, logits: np.ndarray, index: int) -> int:
        assert self._penalties is not None
        tokens = self._penalties.tokens
        before = logits[tokens]
        logits[tokens] = self._penalties.applied(before)
        try:
            token = self._draw(logits, index)
        finally:
            logits[tokens] = before
        self._penalties.count(token)
        return token

    def _draw(self, logits: np.ndarray, index: int) -> int:
        best = logits.argmax()  # the first NaN, if there is one
        most = logits[best]
        if most == -np.inf:
            raise NoTokenAllowedError("no token is allowed")
        if not math.isfinite(most):
            raise ArithmeticError("the model's logits are not finite")
        if self._takes_best:
            return int(best)
        if self._among_allowed:
            return self._sample_among_allowed(logits)
        if self._reach is not None:
            near = (logits >= most - np.float32(self._reach)).nonzero()[0]
            found = len(near)
            if found <= MAX_CANDIDATES and (found >= self._least or self._reach == self._farthest):
                self._attempts = min(self._attempts + 1, _ATTEMPTS)
                return self._chain.sample_among(near, logits[near])
            self._adapt_search(found)
        return self._chain.sample(self._context, index)

    def _rule_out_ends(self, logits: np.ndarray) -> None:
        """Forbids end tokens in place, unless only they are allowed: a response format has precedence over
        `min_tokens`."""
        before = logits[self._ends]
        logits[self._ends] = -np.inf
        if logits.max() == -np.inf:
            logits[self._ends] = before

    def _sample_among_allowed(self, logits: np.ndarray) -> int:
        allowed = (logits > -np.inf).nonzero()[0]
        return self._chain.sample_among(allowed, logits[allowed], self._dry_chain)

    def accept(self, tokens: Sequence[int]) -> None:
        """Adds tokens of the answer that another worker drew, before the first draw. Penalties, DRY and `min_tokens`
        count them. That worker's state of the random generator and of Mirostat is unknown.
        """
        self._drawn = len(tokens)
        if self._dry is not None:
            self._earlier_tokens = tokens
        if self._penalties is not None:
            for token in tokens:
                self._penalties.count(token)

    def close(self) -> None:
        """Frees the chains that exist."""
        for name in ("_chain", "_dry_chain"):
            if (chain := self.__dict__.get(name)) is not None:
                chain.close()


class ConstrainedSampler:
    """Masks the logits in place, draws with another sampler and advances the mask."""

    def __init__(self, inner: TokenSampler, backend: Backend, mask: Mask) -> None:
        """`inner` draws from the logits of `backend`; `mask` is used by this answer only."""
        self._inner = inner
        self._backend = backend
        self._mask = mask

    def sample(self, index: int) -> int:
        """Draws and accepts the token after batch index `index`.

        Raises ConstraintError, and what `inner` raises except NoTokenAllowedError.
        """
        self._mask.apply(self._backend.logits(index))
        try:
            token = self._inner.sample(index)
        except NoTokenAllowedError:
            raise ConstraintError(ConstraintError.RULED_OUT) from None
        self._mask.accept(token)
        return token

    def accept(self, tokens: Sequence[int]) -> None:
        """Accepts tokens of the answer that another worker drew; raises ConstraintError."""
        self._inner.accept(tokens)
        for token in tokens:
            self._mask.accept(token)

    def close(self) -> None:
        """Frees the inner sampler."""
        self._inner.close()


class Distribution:
    """Log probabilities (natural) of all tokens at one position, before any sampling parameter changed them.

    Holds on to `logits` (float32, one per vocabulary entry); use it before they change.
    """

    __slots__ = ("_logits", "_norm")

    def __init__(self, logits: np.ndarray, norm: float) -> None:
        self._logits = logits
        self._norm = norm

    @classmethod
    def of(cls, logits: np.ndarray) -> Distribution:
        """The distribution of raw logits. Single precision for the terms, double for their sum: exact to about 1e-7.

        Raises ArithmeticError where they are not finite.
        """
        most = float(logits.max())
        if not math.isfinite(most):
            raise ArithmeticError("the model's logits are not finite")
        return cls(logits, most + math.log(np.exp(logits - np.float32(most)).sum(dtype=np.float64)))

    def logprob(self, token: int) -> float:
        """Log probability of one token."""
        return float(self._logits[token]) - self._norm

    def top(self, count: int) -> list[tuple[int, float]]:
        """The `count` likeliest tokens, likeliest first."""
        if count <= 0:
            return []
        count = min(count, len(self._logits))
        best = np.argpartition(self._logits, -count)[-count:]
        best = best[np.argsort(-self._logits[best], kind="stable")]
        return [(int(token), self.logprob(token)) for token in best]
