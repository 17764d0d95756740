"""Sampler chains of llama.cpp."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any

import numpy as np

from inference.worker.llama.binding import lib
from inference.worker.llama.context import Context
from inference.worker.llama.llama_process import without_gil_release

MAX_CANDIDATES = 2048
"""Maximum number of tokens that callers pass to `sample_among`."""

MIN_LOGIT = np.float32(-1e30)
"""Lower limit of a logit after penalties. With minus infinity for all tokens, no token could be sampled."""

_sample = without_gil_release("llama_sampler_sample")
_apply = without_gil_release("llama_sampler_apply")
_accept = without_gil_release("llama_sampler_accept")
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Sampler:
    """An owned chain of llama.cpp samplers. Use it as a context manager or call `close`."""

    def __init__(self) -> None:
        params = lib.llama_sampler_chain_default_params()
        params.no_perf = True
        self.handle = lib.llama_sampler_chain_init(params)
        self._few: np.ndarray | None = None
        self._few_array: Any = None
        self._pointer: Any = None

    def add(self, name: str, *arguments: object) -> Sampler:
        """Appends `llama_sampler_init_<name>(*arguments)`; the arguments must be valid."""
        return self.add_part(getattr(lib, f"llama_sampler_init_{name}")(*arguments))

    def add_part(self, part: Any) -> Sampler:
        """Appends a sampler of llama.cpp; the chain takes ownership."""
        lib.llama_sampler_chain_add(self.handle, part)
        return self

    def sample(self, context: Context, index: int) -> int:
        """Samples and accepts a token from the logits at batch index `index`."""
        return int(_sample(self.handle, context.handle, index))

    def sample_among(self, tokens: np.ndarray, logits: np.ndarray, dry: Sampler | None = None) -> int:
        """Samples and accepts one of `tokens` (ascending, at least one) from their finite `logits`.

        `dry` changes the logits first. It neither reorders nor drops tokens, and limits logits to `MIN_LOGIT`.
        `sample` copies and sorts the whole vocabulary, which takes several times as long as sampling from at most
        `MAX_CANDIDATES` tokens.
        """
        count = len(tokens)
        if self._few is None or len(self._few) < count:
            self._few = np.zeros(max(count, MAX_CANDIDATES), _CANDIDATE)
            self._pointer = self._few.ctypes.data_as(ctypes.POINTER(lib.llama_token_data))
            self._few_array = lib.llama_token_data_array(data=self._pointer, size=0, selected=-1, sorted=False)
        self._few["id"][:count] = tokens
        self._few["logit"][:count] = logits
        array = self._few_array
        # reset on each call, because XTC moves `data`
        array.data, array.size, array.selected, array.sorted = self._pointer, count, -1, False
        if dry is not None:
            _apply(dry.handle, ctypes.byref(array))
            changed = self._few["logit"][:count]
            np.maximum(changed, MIN_LOGIT, out=changed)
        _apply(self.handle, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        _accept(self.handle, token)
        if dry is not None:
            dry.accept(token)
        return token

    def accept(self, token: int) -> None:
        """Accepts `token` as sampled."""
        _accept(self.handle, token)

    def close(self) -> None:
        """Frees the chain; a second call does nothing."""
        if self.handle:
            lib.llama_sampler_free(self.handle)
            self.handle = None

    def __enter__(self) -> Sampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
