"""What a trial makes of a device that does not do as it is told: each step can fail, and wrong numbers are seen."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from inference.jobs import trial


class PaperLibrary:
    """ggml's functions with one device behind them; those named in `failing` give what they give when they fail."""

    def __init__(self, **failing: int | None) -> None:
        self.failing = failing

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments: self.failing.get(name, 0 if name == "ggml_backend_graph_compute" else 1)


class WrongLibrary(PaperLibrary):
    """A device whose product is right but for one number."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices: list[Any] = []

    def ggml_backend_tensor_set(self, _tensor: int, data: int, _offset: int, size: int) -> None:
        kept = np.frombuffer(ctypes.string_at(data, size), dtype=np.float32).reshape(-1, trial.LONG)
        self.matrices.append(kept)

    def ggml_backend_tensor_get(self, _tensor: int, data: int, _offset: int, size: int) -> None:
        left, right = self.matrices
        product = right @ left.T
        product[3, 5] += 1.0
        ctypes.memmove(data, product.ctypes.data, size)


@pytest.mark.parametrize(
    ("library", "error"),
    [
        (PaperLibrary(ggml_backend_dev_init=None), "it cannot be opened"),
        (PaperLibrary(ggml_backend_alloc_ctx_tensors=None), "it has no memory left for a trial"),
        (PaperLibrary(ggml_backend_graph_compute=-1), "it does not compute (status -1)"),
        (PaperLibrary(), "it computes 8192 of 8192 numbers wrong"),
        (WrongLibrary(), "it computes 1 of 8192 numbers wrong"),
    ],
    ids=["closed", "full", "refusing", "silent", "wrong"],
)
def test_a_device_that_fails_is_told_how(library: Any, error: str) -> None:
    assert trial._tried(library, 1) == {"error": error}
