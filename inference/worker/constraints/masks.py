"""Follows one answer and says which tokens may come next; never draws one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from inference.worker.errors import ConstraintError

T = TypeVar("T")


class Guide:
    """The mask of one answer over llguidance's matcher. Used by one thread at a time."""

    def __init__(self, matcher: Any, n_vocab: int) -> None:
        """`matcher` is this answer's own."""
        self._matcher = matcher
        self._n_vocab = n_vocab
        self._words = np.zeros((n_vocab + 31) // 32, np.int32)
        self._bytes = self._words.view(np.uint8)
        self._where = self._words.ctypes.data

    def apply(self, logits: np.ndarray) -> None:
        """Sets what may not follow to -inf. Raises ConstraintError when the limits of a step are reached."""
        _guarded(self._matcher.unsafe_compute_mask_ptr, self._where, self._words.nbytes)
        self._check()
        if not self._words.any():
            raise ConstraintError("nothing may follow in this answer: what was asked for cannot be completed")
        np.invert(self._words, out=self._words)
        forbidden = np.unpackbits(self._bytes, count=self._n_vocab, bitorder="little").view(np.bool_)
        np.copyto(logits, -np.inf, where=forbidden)

    def accept(self, token: int) -> None:
        """Goes on behind `token`; raises ConstraintError when it may not follow."""
        if not _guarded(self._matcher.consume_token, token):
            self._check()
            raise ConstraintError(_IMPOSSIBLE)

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        said = self._matcher.get_error().split("\n")[0][:300]
        if "doesn't satisfy the grammar" in said:
            raise ConstraintError(_IMPOSSIBLE)
        raise ConstraintError(f"the answer could not be held to its form any longer: {said}")


_IMPOSSIBLE = (
    "every token that may follow in this answer was ruled out by other parameters; leave out logit_bias and ignore_eos"
)


def _guarded(call: Callable[..., T], *arguments: object) -> T:
    """Runs llguidance. Its panics arrive as BaseException, which would end the thread; they end the request."""
    try:
        return call(*arguments)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ConstraintError(f"the answer could not be held to its form any longer: {error!s:.300}") from None
