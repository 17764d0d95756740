"""Trial of a device: failing steps and wrong results."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np
import pytest

from inference.devices import compute_trial as devices_trial
from inference.devices import compute_trial_job
from inference.devices.device import Reading
from inference.workers.helper_client import HelperError


class PaperLibrary:
    """Functions of ggml with one device; those in `failing` return the given failure."""

    def __init__(self, **failing: int | None) -> None:
        self.failing = failing

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments: self.failing.get(name, 0 if name == "ggml_backend_graph_compute" else 1)


class WrongLibrary(PaperLibrary):
    """A device that computes one number wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices: list[Any] = []

    def ggml_backend_tensor_set(self, _tensor: int, data: int, _offset: int, size: int) -> None:
        kept = np.frombuffer(ctypes.string_at(data, size), dtype=np.float32).reshape(-1, compute_trial_job.LONG)
        self.matrices.append(kept)

    def ggml_backend_tensor_get(self, _tensor: int, data: int, _offset: int, size: int) -> None:
        left, right = self.matrices
        product = right @ left.T
        product[3, 5] += 1.0
        ctypes.memmove(data, product.ctypes.data, size)


@pytest.mark.parametrize(
    ("library", "answer"),
    [
        (PaperLibrary(ggml_backend_dev_init=None), {"error": "it cannot be opened"}),
        (PaperLibrary(ggml_backend_alloc_ctx_tensors=None), {"full": "it has no memory left"}),
        (PaperLibrary(ggml_backend_graph_compute=-1), {"error": "it does not compute (status -1)"}),
        (PaperLibrary(), {"error": "it computes 8192 of 8192 numbers wrong"}),
        (WrongLibrary(), {"error": "it computes 1 of 8192 numbers wrong"}),
    ],
    ids=["closed", "full", "refusing", "silent", "wrong"],
)
def test_failure_of_a_device_is_described(library: Any, answer: dict[str, str]) -> None:
    assert compute_trial_job.check_product(library, 1) == answer


@pytest.mark.parametrize(
    ("output", "passes"),
    [
        ("CUDA error: out of memory\n  current device: 0, in function ggml_backend_cuda_init\nggml-cuda.cu:95", True),
        ("CUDA error: unspecified launch failure\nggml-cuda.cu:95: CUDA error", False),
        ("", False),
    ],
    ids=["full", "broken", "silent"],
)
async def test_trial_that_ends_with_out_of_memory_is_no_failure_of_the_device(output: str, passes: bool) -> None:
    """Backends print the reason before they abort; models may fill a healthy device."""

    async def run(*_arguments: Any, **_more: Any) -> dict[str, Any]:
        raise HelperError("the trial helper ended with status -6", output)

    with contextlib.nullcontext() if passes else pytest.raises(HelperError):
        await devices_trial.trial(Reading("gpu-0", "cuda", "card", 10, 0, 10), run=run)
