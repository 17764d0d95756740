"""The seam between the engine and llama.cpp: what a computing context, a vocabulary and a sampler can do.

The package `llama` is the real thing; tests drive the engine with a fake that returns every code there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np


class Decode(IntEnum):
    """What llama_decode returned. NO_ROOM and BAD_BATCH leave the memory as it was, the others may not."""

    OK = 0
    NO_ROOM = 1
    ABORTED = 2
    BAD_BATCH = -1
    ALLOC_FAILED = -2
    COMPUTE_FAILED = -3


OK = Decode.OK
"""Asked for several times a step; Python 3.11 looks members of enums up through their class."""


class BatchRow(Protocol):
    """A run of tokens of one sequence; `sample` asks for logits at its last token, `every` at all of them."""

    @property
    def slot(self) -> int:
        """Sequence id."""
        ...

    @property
    def start(self) -> int:
        """Position of the first token."""
        ...

    @property
    def tokens(self) -> Sequence[int]:
        """Validated token ids."""
        ...

    @property
    def sample(self) -> bool:
        """Whether a token follows."""
        ...

    @property
    def every(self) -> bool:
        """Whether the logits at all of its tokens are wanted, not only at the last."""
        ...


class Backend(Protocol):
    """A context that computes; every method is called from the engine's thread only."""

    can_trim: bool

    def remove(self, slot: int, start: int = 0) -> bool:
        """Forgets the tokens of `slot` from `start` on."""
        ...

    def copy(self, source: int, target: int, count: int) -> None:
        """Shares the first `count` tokens of `source`."""
        ...

    def decode(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
        """Computes one batch; returns the batch index of each row's last token."""
        ...

    def logits(self, index: int) -> np.ndarray:
        """Logits at a batch index, valid until the next decode."""
        ...


@dataclass(eq=False)
class ImageTile:
    """An image, or a tile of one, as a prompt holds it.

    Its `n_tokens` cells move the text behind them on by `n_positions` only. `non_causal`: its tokens see one another in
    both directions. Where its tokens do not just follow each other (M-RoPE), they are at `positions` plus `moves` times
    the position where it begins; both have four sections by tokens. `rows` are its embeddings (float32, tokens by
    width) once it was encoded from `source`, which is the projector's own.
    """

    n_tokens: int
    n_positions: int
    non_causal: bool = False
    positions: np.ndarray | None = None
    moves: np.ndarray | None = None
    source: Any = None
    rows: np.ndarray | None = None


class Vocabulary(Protocol):
    """What the engine needs to know of a model's tokens."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a generation."""
        ...

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of a token."""
        ...


class TokenSampler(Protocol):
    """Draws the next token of one sequence."""

    def sample(self, index: int) -> int:
        """Draws and accepts from the logits at a batch index."""
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Before the first draw: tokens of the answer that were drawn elsewhere."""
        ...

    def close(self) -> None:
        """Frees it; called once, on the engine's thread."""
        ...


class Mask(Protocol):
    """Which tokens may follow in one answer. Used by the engine's thread only; raises ConstraintError."""

    def apply(self, logits: np.ndarray) -> None:
        """Sets the logits (float32, one per vocabulary entry, in place) of tokens that may not follow to -inf."""
        ...

    def accept(self, token: int) -> None:
        """The token that was drawn."""
        ...


class Constraint(Protocol):
    """A compiled form; every choice of a request starts a mask of its own."""

    def start(self) -> Mask:
        """A mask at the beginning of an answer."""
        ...
