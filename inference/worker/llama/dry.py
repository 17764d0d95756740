"""Samplers of llama.cpp for the DRY penalty: created once per setting and copied for each answer.

To create one, llama.cpp compares each sequence breaker with all tokens of the vocabulary: about 4 ms per breaker with
128,000 tokens. A copy takes microseconds.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

from inference.worker.llama.binding import lib

MOST_PROTOTYPES = 32


class Dry(NamedTuple):
    """Validated settings of the penalty; `last_n` is at least 1."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int
    breakers: tuple[str, ...]


class DryPrototypes:
    """The samplers of one vocabulary. Thread-safe except for `close`."""

    def __init__(self, vocab: Any) -> None:
        self._vocab = vocab
        self._lock = threading.Lock()
        self._prototypes: OrderedDict[Dry, Any] = OrderedDict()

    def prepare(self, dry: Dry) -> None:
        """Creates the prototype for `sampler` unless it exists. Slow: not for the event loop or the engine thread."""
        with self._lock:
            if dry in self._prototypes:
                self._prototypes.move_to_end(dry)
                return
        breakers = [text.encode("utf-8", "replace") for text in dry.breakers]
        texts = (ctypes.c_char_p * len(breakers))(*breakers)
        made = lib.llama_sampler_init_dry(self._vocab, *dry[:4], texts, len(breakers))
        with self._lock:
            if dry in self._prototypes:  # another thread was faster
                lib.llama_sampler_free(made)
                return
            self._prototypes[dry] = made
            if len(self._prototypes) > MOST_PROTOTYPES:
                lib.llama_sampler_free(self._prototypes.popitem(last=False)[1])

    def sampler(self, dry: Dry) -> Any:
        """A new DRY sampler without history, owned by the caller; slow if `prepare` was not called before."""
        while True:
            with self._lock:
                if (prototype := self._prototypes.get(dry)) is not None:
                    return lib.llama_sampler_clone(prototype)
            self.prepare(dry)

    def close(self) -> None:
        """Frees the prototypes."""
        for prototype in self._prototypes.values():
            lib.llama_sampler_free(prototype)
        self._prototypes.clear()
