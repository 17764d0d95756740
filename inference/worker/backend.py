"""The interfaces between the engine and llama.cpp: context, vocabulary, sampler and constraint.

The package `llama` implements them. Tests use a fake that can return every status code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np


class Decode(IntEnum):
    """Status of llama_decode. NO_ROOM and BAD_BATCH leave the KV cache unchanged; other errors may change it."""

    OK = 0
    NO_ROOM = 1
    ABORTED = 2
    BAD_BATCH = -1
    ALLOC_FAILED = -2
    COMPUTE_FAILED = -3


OK = Decode.OK
"""A module constant, because Python 3.11 looks up enum members slowly."""


class BatchRow(Protocol):
    """Tokens of one sequence in a batch. `sample`: logits of the last token are needed; `every`: of all tokens."""

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
        """Whether a token is sampled from the logits of the last token."""
        ...

    @property
    def every(self) -> bool:
        """Whether the logits of all tokens are needed."""
        ...


class Backend(Protocol):
    """A context that computes batches. All methods are called on the engine thread only. `can_trim`: see `Limits`."""

    can_trim: bool

    def remove(self, slot: int, start: int = 0) -> bool:
        """Removes the tokens of `slot` from `start` on; False if a part of a sequence cannot be removed."""
        ...

    def copy(self, source: int, target: int, count: int) -> None:
        """Copies the first `count` tokens of `source` to the empty slot `target`."""
        ...

    def save(self, slot: int) -> Any:
        """The state of `slot` that later tokens overwrite, for `restore`; None if saving fails, as without memory."""
        ...

    def restore(self, slot: int, state: Any, count: int) -> bool:
        """Puts back a state of the first `count` tokens of `slot`, and removes the others.

        Returns False, with an empty slot, if llama.cpp rejects the state.
        """
        ...

    def decode(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
        """Computes one batch; returns the status and the batch index of the last token of each row."""
        ...

    def logits(self, index: int) -> np.ndarray:
        """Logits at a batch index; valid until the next decode."""
        ...


@dataclass(eq=False)
class ImageTile:
    """An image, or a tile of one, in a prompt.

    It takes `n_tokens` cells and `n_positions` positions. `non_causal`: its tokens attend to each other in both
    directions. With M-RoPE its tokens are at `positions` plus `moves` times its start position; both arrays have
    the shape (4, n_tokens). `rows`: embeddings (float32, tokens by width), None until it is encoded. `source`: an
    object of the projector.
    """

    n_tokens: int
    n_positions: int
    non_causal: bool = False
    positions: np.ndarray | None = None
    moves: np.ndarray | None = None
    source: Any = None
    rows: np.ndarray | None = None


class Vocabulary(Protocol):
    """The tokens of a model. `Model` of the package `llama` has all of this; a fake has what its tests need."""

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""
        ...

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a generation."""
        ...

    @property
    def bos(self) -> int | None:
        """Beginning of a text (BOS, CLS)."""
        ...

    @property
    def eos(self) -> int | None:
        """End of a text."""
        ...

    @property
    def sep(self) -> int | None:
        """Separator of two texts."""
        ...

    @property
    def adds_bos(self) -> bool:
        """Whether a text begins with BOS."""
        ...

    @property
    def adds_eos(self) -> bool:
        """Whether a text ends with EOS."""
        ...

    @property
    def adds_sep(self) -> bool:
        """Whether the tokenizer adds SEP between two texts."""
        ...

    @property
    def longest_piece(self) -> int | None:
        """Maximum number of bytes of one token, None when unknown."""
        ...

    @property
    def fill_tokens(self) -> tuple[int, int, int] | None:
        """The fill-in-the-middle tokens before the prefix, the suffix and the middle; None if one is missing."""
        ...

    @property
    def message_tokens(self) -> np.ndarray:
        """Control tokens (int32) that do not end a generation; templates begin messages with them."""
        ...

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of a token; those of a control token are empty unless `special`."""
        ...

    def text_of(self, token: int | None) -> str:
        """Text of a special token, empty for None."""
        ...

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text."""
        ...


class TokenSampler(Protocol):
    """Samples the tokens of one sequence."""

    def sample(self, index: int) -> int:
        """Samples and accepts a token from the logits at a batch index."""
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Accepts tokens of the answer that another worker generated. Call it before the first `sample`."""
        ...

    def close(self) -> None:
        """Frees the sampler. Called once, on the engine thread."""
        ...


class Mask(Protocol):
    """The tokens that a constraint allows next in one answer. Used on the engine thread; raises ConstraintError."""

    def apply(self, logits: np.ndarray) -> None:
        """Sets the logits (float32, one per vocabulary entry) of tokens that are not allowed to -inf, in place."""
        ...

    def accept(self, token: int) -> None:
        """Accepts a sampled token."""
        ...


class Constraint(Protocol):
    """A compiled grammar. Each choice of a request starts its own mask."""

    def start(self) -> Mask:
        """A mask for the start of an answer."""
        ...
