"""Samplers of llama.cpp's DRY penalty, made once for each setting and copied for each answer; decides nothing.

llama.cpp compares every sequence breaker with every token of the vocabulary, about 4 ms for each breaker and 128,000
tokens. A copy takes microseconds.
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
    """Of one vocabulary. Thread-safe for everything but `close`."""

    def __init__(self, vocab: Any) -> None:
        self._vocab = vocab
        self._lock = threading.Lock()
        self._prototypes: OrderedDict[Dry, Any] = OrderedDict()

    def prepare(self, dry: Dry) -> None:
        """Makes what `sampler` copies, unless it is there; on a thread that nothing waits for."""
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
        """A DRY sampler of the caller's own, without history; slow where `prepare` was not called."""
        while True:
            with self._lock:
                if (prototype := self._prototypes.get(dry)) is not None:
                    return lib.llama_sampler_clone(prototype)
            self.prepare(dry)

    def close(self) -> None:
        """Frees what `prepare` made."""
        for prototype in self._prototypes.values():
            lib.llama_sampler_free(prototype)
        self._prototypes.clear()
