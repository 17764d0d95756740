"""Follows one answer and says which tokens may come next; never draws one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from inference.worker.worker_errors import ConstraintError

T = TypeVar("T")

ALLOWANCE_SECONDS = 1.0
PER_TOKEN_SECONDS = 0.005
"""Masks of JSON schemas take 0.02 to 0.2 ms each (docs/benchmarks.md); an allowance that is spent is no accident."""


_BYTES = np.arange(256, dtype=np.uint8)[:, None]
_LIMITS = np.where(np.unpackbits(_BYTES, axis=1, bitorder="little"), np.float32(np.inf), np.float32(-np.inf))
"""For each byte of a bit mask the most that eight logits may be."""


class Scratch:
    """Memory for masks over `n_vocab` tokens, shared by all answers of a model: a mask is applied as soon as it is
    made, and one thread makes them all.
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

    The answers of a form share an automaton that grows with what they say, up to a limit. An answer that meets the
    limit ends and says so: another automaton takes seconds to compile, and all answers of the model would wait.

    An ambiguous grammar costs more with every token, and all answers wait while one mask is made. So each answer has an
    allowance of computing time: ALLOWANCE_SECONDS, and PER_TOKEN_SECONDS more for every token.
    """

    def __init__(
        self, matcher: Any, scratch: Scratch, spent: Callable[[], bool], clock: Callable[[], float] = time.thread_time
    ) -> None:
        """`matcher` is this answer's own copy; `spent` is told when the automaton has met its limit, and says
        whether answers of other requests share it. `clock` counts the seconds that this thread computed.
        """
        self._matcher = matcher
        self._scratch = scratch
        self._spent = spent
        self._clock = clock
        self._left = ALLOWANCE_SECONDS

    def apply(self, logits: np.ndarray) -> None:
        """Sets what may not follow to -inf; raises ConstraintError when limits are reached."""
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
        """Goes on behind `token`; raises ConstraintError when it may not follow."""
        began = self._clock()
        if not guarded(self._matcher.consume_token, token):
            raise self._failed(_RULED_OUT)
        self._left = min(self._left + PER_TOKEN_SECONDS, ALLOWANCE_SECONDS)
        self._spend(began)

    def _failed(self, otherwise: str) -> ConstraintError:
        """What ends the answer: a limit, or what `otherwise` says."""
        error = str(self._matcher.get_error()).split("\n")[0][:300]
        if "too many states" in error:
            return ConstraintError((_WORN_OUT if self._spent() else _TOO_COMPLEX).format(error))
        is_limit = any(word in error for word in _LIMIT_WORDS) and _UNFIT not in error
        return ConstraintError(_TOO_COMPLEX.format(error) if is_limit else otherwise)

    def _spend(self, began: float) -> None:
        self._left -= self._clock() - began
        if self._left < 0:
            raise ConstraintError(_TOO_COMPLEX.format("it takes too long to tell what may follow"))


_TOO_COMPLEX = "what the answer must look like is too complex for an answer as long as this: {}"
_WORN_OUT = (
    _TOO_COMPLEX + ", counted over all answers of this form up to now; asked again, the request is counted alone"
)
_LIMIT_WORDS = ("lexer error", "Parser Error", "Too many items", "TooComplex")
_UNFIT = "doesn't satisfy the grammar"
_DEAD_END = "nothing may follow in this answer: what was asked for cannot be completed"
_RULED_OUT = (
    "every token that may follow in this answer was ruled out by other parameters; leave out logit_bias and ignore_eos"
)


def guarded(call: Callable[..., T], *arguments: object) -> T:
    """Runs llguidance. Its panics arrive as BaseException, which would end the thread; they end the request."""
    try:
        return call(*arguments)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ConstraintError(_TOO_COMPLEX.format(f"{error!s:.300}")) from None
