"""Computes which tokens may follow in one answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from inference.worker.worker_errors import ConstraintError

T = TypeVar("T")

ALLOWANCE_SECONDS = 1.0
PER_TOKEN_SECONDS = 0.005
"""Masks of JSON schemas take 0.02 to 0.2 ms each (docs/benchmarks.md). Only ambiguous grammars spend the allowance."""


_BYTES = np.arange(256, dtype=np.uint8)[:, None]
_LIMITS = np.where(np.unpackbits(_BYTES, axis=1, bitorder="little"), np.float32(np.inf), np.float32(-np.inf))
"""For each byte of a bit mask, the upper bounds of eight logits."""


class Scratch:
    """Memory for masks over `n_vocab` tokens. All answers of a model share it, because a mask is applied right after it
    is computed, on one thread.
    """

    def __init__(self, n_vocab: int) -> None:
        self.words = np.zeros((n_vocab + 31) // 32, np.int32)
        self._bytes = self.words.view(np.uint8)
        self._spread = np.empty((len(self._bytes), 8), np.float32)
        self._limits = self._spread.reshape(-1)[:n_vocab]
        self.address = self.words.ctypes.data

    def apply(self, logits: np.ndarray) -> None:
        """Sets logits whose bit is 0 to -inf, at a cost that does not depend on the bits: 12 us for 32,000 tokens and
        45 us for 128,000, where a masked assignment takes up to 100 and 800 us.
        """
        np.take(_LIMITS, self._bytes, axis=0, out=self._spread, mode="clip")
        np.minimum(logits, self._limits, out=logits)


class Guide:
    """The mask of one answer over llguidance's matcher.

    The answers of a form share an automaton that grows with their texts, up to a limit. An answer that reaches the
    limit ends with an error: another automaton takes seconds to compile, and all answers of the model would wait.

    An ambiguous grammar costs more with every token, and all answers wait while one mask is computed. So each answer
    has an allowance of computing time: ALLOWANCE_SECONDS, to which every token gives back PER_TOKEN_SECONDS.
    """

    def __init__(
        self, matcher: Any, scratch: Scratch, spent: Callable[[], bool], clock: Callable[[], float] = time.thread_time
    ) -> None:
        """`matcher` is a copy for this answer. `spent` is called when the automaton reaches its limit; it returns
        whether other requests share the automaton. `clock` counts the computing seconds of this thread.
        """
        self._matcher = matcher
        self._scratch = scratch
        self._spent = spent
        self._clock = clock
        self._left = ALLOWANCE_SECONDS

    def apply(self, logits: np.ndarray) -> None:
        """Sets the logits of forbidden tokens to -inf; raises ConstraintError when a limit is reached."""
        began = self._clock()
        scratch = self._scratch
        guarded(self._matcher.unsafe_compute_mask_ptr, scratch.address, scratch.words.nbytes)
        if self._matcher.is_error():
            raise self._failed(_DEAD_END)
        if not scratch.words.any():
            raise ConstraintError(_DEAD_END)
        scratch.apply(logits)
        self._spend(began)

    def accept(self, token: int) -> None:
        """Advances by `token`; raises ConstraintError when it is forbidden."""
        began = self._clock()
        if not guarded(self._matcher.consume_token, token):
            raise self._failed(ConstraintError.RULED_OUT)
        self._left = min(self._left + PER_TOKEN_SECONDS, ALLOWANCE_SECONDS)
        self._spend(began)

    def _failed(self, otherwise: str) -> ConstraintError:
        """The error that ends the answer: a limit, or `otherwise`."""
        error = str(self._matcher.get_error()).split("\n")[0][:300]
        if "too many states" in error:
            return ConstraintError((_WORN_OUT if self._spent() else _TOO_COMPLEX).format(error))
        is_limit = any(word in error for word in _LIMIT_WORDS) and _UNFIT not in error
        return ConstraintError(_TOO_COMPLEX.format(error) if is_limit else otherwise)

    def _spend(self, began: float) -> None:
        self._left -= self._clock() - began
        if self._left < 0:
            raise ConstraintError(_TOO_COMPLEX.format("computing the allowed tokens takes too long"))


_TOO_COMPLEX = "the required format is too complex for an answer of this length: {}"
_WORN_OUT = _TOO_COMPLEX + " (all answers with this format share the limit; send the request again)"
_LIMIT_WORDS = ("lexer error", "Parser Error", "Too many items", "TooComplex")
_UNFIT = "doesn't satisfy the grammar"
_DEAD_END = "no token is allowed next: the required format cannot be completed"


def guarded(call: Callable[..., T], *arguments: object) -> T:
    """Calls llguidance. Its panics are BaseExceptions, which would end the thread; here they fail the request."""
    try:
        return call(*arguments)
    except BaseException as error:
        raise ConstraintError(_TOO_COMPLEX.format(f"{error!s:.300}")) from None
