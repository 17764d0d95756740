"""Chains of llama.cpp's samplers, owned and freed; decides nothing about their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from llama_cpp import llama_cpp as lib

from inference.worker.llama.context import Context
from inference.worker.llama.process import quick

_sample = quick("llama_sampler_sample")


class Sampler:
    """An owned chain of llama.cpp samplers; use as a context manager or call `close`."""

    def __init__(self) -> None:
        params = lib.llama_sampler_chain_default_params()
        params.no_perf = True
        self.handle = lib.llama_sampler_chain_init(params)

    def add(self, name: str, *arguments: object) -> Sampler:
        """Appends `llama_sampler_init_<name>(*arguments)`; the arguments were validated before."""
        part = getattr(lib, f"llama_sampler_init_{name}")(*arguments)
        lib.llama_sampler_chain_add(self.handle, part)
        return self

    def add_bias(self, n_vocab: int, bias: Sequence[tuple[int, float]]) -> Sampler:
        """Appends a bias added to the logits of single tokens."""
        entries = (lib.llama_logit_bias * len(bias))(*(lib.llama_logit_bias(*entry) for entry in bias))
        return self.add("logit_bias", n_vocab, len(bias), entries)

    def sample(self, context: Context, index: int) -> int:
        """Draws and accepts the token after the one at batch index `index`."""
        return int(_sample(self.handle, context.handle, index))

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
