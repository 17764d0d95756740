"""Draws tokens within a constraint: masks the logits, draws with another sampler, advances the mask."""

from __future__ import annotations

from collections.abc import Sequence

from inference.worker.backend import Backend, Mask, TokenSampler


class ConstrainedSampler:
    """A request's sampler under a mask. What goes wrong ends this request only, as ConstraintError."""

    def __init__(self, inner: TokenSampler, backend: Backend, mask: Mask) -> None:
        """`inner` draws from the logits of `backend`; `mask` is this answer's own."""
        self._inner = inner
        self._backend = backend
        self._mask = mask

    def sample(self, index: int) -> int:
        """Draws and accepts the token after batch index `index`; raises ConstraintError."""
        self._mask.apply(self._backend.logits(index))
        token = self._inner.sample(index)
        self._mask.accept(token)
        return token

    def accept(self, tokens: Sequence[int]) -> None:
        """Tokens of the answer that were drawn elsewhere; raises ConstraintError."""
        self._inner.accept(tokens)
        for token in tokens:
            self._mask.accept(token)

    def close(self) -> None:
        """Frees the inner sampler."""
        self._inner.close()
