"""Decides why a worker process ended, from what it left behind, by one table; never restarts anything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from inference.protocol import ExitCause

_C = ExitCause
TEXTS: Sequence[tuple[re.Pattern[str], ExitCause]] = [
    # the device itself is gone: CUDA, cuBLAS, NVML, Metal, ROCm, ggml's RPC backend
    (
        re.compile(
            r"cudaErrorDeviceUninitialized|device.* is lost|GPU is lost|GPU has fallen off the bus"
            r"|CUDA-capable device\(s\) is/are (busy or )?unavailable|no CUDA-capable device"
            r"|cudaErrorContextIsDestroyed|unspecified launch failure|an illegal memory access"
            r"|uncorrectable ECC|driver shutting down|hipErrorNoDevice|hipErrorContextIsDestroyed"
            r"|MTLCommandBufferErrorDeviceRemoved|kIOGPUCommandBufferCallbackErrorInvalidResource"
            r"|Remote RPC server crashed|failed to (send|recv) .*RPC",
            re.IGNORECASE,
        ),
        _C.DEVICE_LOST,
    ),
    # memory ran out while computing: CUDA aborts, Metal and ROCm report a failed command buffer
    (
        re.compile(
            r"CUDA error.*out of memory|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|cuMemCreate.*failed"
            r"|hipErrorOutOfMemory|HIP error.*out of memory|ROCm error.*out of memory|HIPBLAS_STATUS_ALLOC_FAILED"
            r"|kIOGPUCommandBufferCallbackErrorOutOfMemory|Insufficient Memory|std::bad_alloc",
            re.IGNORECASE | re.DOTALL,
        ),
        _C.OOM_COMPUTE,
    ),
    # memory ran out while loading, seen cleanly
    (
        re.compile(
            r"failed to allocate (buffer|\w+ buffer|CUDA\S* buffer)|unable to allocate|failed to allocate compute"
            r"|cudaMalloc failed|ggml_backend_\w+_buffer_type_alloc_buffer|failed to allocate memory",
            re.IGNORECASE,
        ),
        _C.OOM_LOAD,
    ),
    (
        re.compile(r"GGML_ASSERT|GGML_ABORT|CUDA error|CUBLAS_STATUS_|HIP error|terminate called", re.IGNORECASE),
        _C.ASSERT,
    ),
]

_SIGABRT, _SIGKILL, _SIGBUS, _SIGSEGV, _SIGILL, _SIGFPE, _SIGTERM = 6, 9, 7, 11, 4, 8, 15


@dataclass(frozen=True, slots=True)
class Remains:
    """What is known of an ended worker.

    `status` is the exit status, or minus the signal's number. `requested` and `hang` say that the authority ended it
    itself; `failed_cause` is what its `failed` message said; `greeted` and `ready` how far it had come.
    """

    status: int
    requested: bool = False
    hang: bool = False
    failed_cause: str | None = None
    greeted: bool = True
    ready: bool = True
    last_text: str = ""


def classify(remains: Remains) -> ExitCause:
    """The cause; what the worker or the authority said itself comes before texts, texts before bare statuses."""
    if remains.hang:
        return _C.HANG
    if remains.failed_cause is not None:
        return ExitCause(remains.failed_cause) if remains.failed_cause in set(ExitCause) else _C.STARTUP
    if remains.requested or (remains.status == 0 and remains.ready):
        return _C.REQUESTED
    if remains.status == -_SIGKILL:
        return _C.KILLED
    by_text = cause_of_text(remains.last_text)
    if by_text is not None:
        if by_text is _C.OOM_COMPUTE and not remains.ready:
            return _C.OOM_LOAD
        return by_text
    if remains.status in (-_SIGABRT, -_SIGSEGV, -_SIGBUS, -_SIGILL, -_SIGFPE):
        return _C.ASSERT
    if not remains.greeted or not remains.ready:
        return _C.STARTUP
    return _C.KILLED if remains.status < 0 else _C.ASSERT


def cause_of_text(text: str) -> ExitCause | None:
    """The cause that the last words of a process name, or None."""
    return next((cause for pattern, cause in TEXTS if pattern.search(text)), None)
