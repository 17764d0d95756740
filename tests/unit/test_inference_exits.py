"""Why a worker ended, read from what it left behind: real abort texts of the backends, statuses, its own words."""

from __future__ import annotations

import pytest

from inference.core.exits import Remains, cause_of_text, classify
from inference.protocol import ExitCause

ABORT, KILL, SEGV = -6, -9, -11


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("CUDA error: out of memory\n  current device: 0, in function alloc", ExitCause.OOM_COMPUTE),
        ("ggml_cuda: CUDA error\n CUBLAS_STATUS_ALLOC_FAILED", ExitCause.OOM_COMPUTE),
        ("ROCm error: out of memory", ExitCause.OOM_COMPUTE),
        ("error: kIOGPUCommandBufferCallbackErrorOutOfMemory (00000008:...)", ExitCause.OOM_COMPUTE),
        ("CUDA error: unspecified launch failure", ExitCause.DEVICE_LOST),
        ("CUDA error: an illegal memory access was encountered", ExitCause.DEVICE_LOST),
        ("ggml-rpc.cpp:500: Remote RPC server crashed or returned malformed response", ExitCause.DEVICE_LOST),
        ("llama_kv_cache: failed to allocate buffer for kv cache", ExitCause.OOM_LOAD),
        ("ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9000 MiB: cudaMalloc failed", ExitCause.OOM_LOAD),
        ("GGML_ASSERT(n_tokens <= n_batch) failed", ExitCause.ASSERT),
        ("nothing to see", None),
    ],
)
def test_texts(text: str, cause: ExitCause | None) -> None:
    assert cause_of_text(text) is cause


@pytest.mark.parametrize(
    ("remains", "cause"),
    [
        (Remains(KILL, hang=True, requested=True), ExitCause.HANG),
        (Remains(1, failed_cause="oom_load", ready=False), ExitCause.OOM_LOAD),
        (Remains(1, failed_cause="something new", ready=False), ExitCause.STARTUP),
        (Remains(0, requested=True), ExitCause.REQUESTED),
        (Remains(KILL, requested=True), ExitCause.REQUESTED),
        (Remains(0), ExitCause.REQUESTED),
        (Remains(0, ready=False), ExitCause.STARTUP),
        (Remains(KILL), ExitCause.KILLED),
        (Remains(KILL, ready=False, last_text="GGML_ASSERT"), ExitCause.KILLED),
        (Remains(ABORT), ExitCause.ASSERT),
        (Remains(SEGV), ExitCause.ASSERT),
        (Remains(ABORT, last_text="CUDA error: out of memory"), ExitCause.OOM_COMPUTE),
        (Remains(ABORT, ready=False, last_text="CUDA error: out of memory"), ExitCause.OOM_LOAD),
        (Remains(1, greeted=False, ready=False), ExitCause.STARTUP),
        (Remains(-15), ExitCause.KILLED),
        (Remains(1), ExitCause.ASSERT),
    ],
)
def test_what_is_known_best_counts_first(remains: Remains, cause: ExitCause) -> None:
    assert classify(remains) is cause
