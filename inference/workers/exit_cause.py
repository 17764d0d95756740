"""Decides why a worker process ended, from what it left behind, by one table; never restarts anything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from inference.protocol import ExitCause

_C = ExitCause
TEXTS: Sequence[tuple[re.Pattern[str], ExitCause]] = [
    # the device itself is gone: CUDA, Metal, ROCm, Vulkan, ggml's RPC backend. An illegal address, a failed launch or a
    # device-side assertion is none of these: they end one process's context, and the device goes on.
    (
        re.compile(
            r"cudaErrorDeviceUninitialized|device.* is lost|device lost on|GPU is lost|GPU has fallen off the bus"
            r"|CUDA-capable device\(s\) is/are (busy or )?unavailable|no CUDA-capable device"
            r"|cudaErrorContextIsDestroyed|uncorrectable ECC|driver shutting down"
            r"|hipErrorNoDevice|hipErrorContextIsDestroyed|rocBLAS error: .*No devices found"
            r"|MTLCommandBufferErrorDeviceRemoved|kIOGPUCommandBufferCallbackErrorInvalidResource"
            r"|CommandBufferCallbackErrorSubmissionsIgnored"
            r"|vk::DeviceLostError|ErrorDeviceLost"
            r"|Remote RPC server crashed|failed to (send|recv) .*RPC",
            re.IGNORECASE,
        ),
        _C.DEVICE_LOST,
    ),
    # memory ran out while computing: CUDA aborts, Metal and ROCm report a failed command buffer
    (
        re.compile(
            r"(CUDA|HIP|ROCm) error.*out of memory|cudaErrorMemoryAllocation|cuMemCreate.*failed|hipErrorOutOfMemory"
            r"|(CUBLAS|HIPBLAS|rocblas)_STATUS_ALLOC_FAILED|(CUDA|ROCm) error: the resource allocation failed"
            r"|kIOGPUCommandBufferCallbackErrorOutOfMemory|Insufficient Memory"
            r"|vk::OutOf(Device|Host)MemoryError|std::bad_alloc|could not compute a step \(alloc_failed\)",
            re.IGNORECASE,
        ),
        _C.OOM_COMPUTE,
    ),
    # memory ran out while loading, seen cleanly
    (
        re.compile(
            r"failed to allocate (buffer|\w+ buffer|CUDA\S* buffer)|unable to allocate|failed to allocate compute"
            r"|cudaMalloc failed|ggml_backend_\w+_buffer_type_alloc_buffer|failed to allocate memory"
            r"|Device memory allocation of size \d+ failed|ErrorOutOf(Device|Host)Memory",
            re.IGNORECASE,
        ),
        _C.OOM_LOAD,
    ),
    # what ends a process by design: ggml's own checks, drivers' libraries, C and C++ libraries, interpreters
    (
        re.compile(
            r"GGML_ASSERT|GGML_ABORT|(CUDA|HIP|ROCm|rocBLAS) error|(CUBLAS|HIPBLAS)_STATUS_|vk::\w+Error"
            r"|^\S+\.(c|cc|cpp|cu|cuh|h|hpp|m|mm):\d+: "
            r"|terminate called|terminating (due to|with) uncaught|Assertion .*failed|Assertion failed"
            r"|free\(\): |malloc\(\): |malloc_consolidate|double free|corrupted (size|double|unsorted)"
            r"|stack smashing detected|Fatal Python error",
            re.IGNORECASE | re.MULTILINE,
        ),
        _C.ASSERT,
    ),
]

_OF_BETTER_TIMES = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (debug|info) ")
"""The worker's own log while all was well, which says nothing of its end."""
_SIGABRT, _SIGKILL, _SIGBUS, _SIGSEGV, _SIGILL, _SIGFPE, _SIGTERM = 6, 9, 7, 11, 4, 8, 15


@dataclass(frozen=True, slots=True)
class Remains:
    """What is known of an ended worker.

    `status` is the exit status, or minus the signal's number. `requested` and `hang` say that the authority ended it
    itself; `failed_cause` is what its `failed` message said; `greeted` and `ready` how far it had come. `has_computed`
    is whether a step for a request was completed; `build_is_trusted` whether llama.cpp was found to compute since a
    worker died before its first one.
    """

    status: int
    requested: bool = False
    hang: bool = False
    failed_cause: str | None = None
    greeted: bool = True
    ready: bool = True
    has_computed: bool = True
    build_is_trusted: bool = False
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
        if by_text in (_C.OOM_COMPUTE, _C.OOM_LOAD):
            return _C.OOM_COMPUTE if remains.ready else _C.OOM_LOAD
        return by_text
    if remains.status in (-_SIGILL, -_SIGSEGV) and not (remains.has_computed or remains.build_is_trusted):
        return _C.BROKEN_BUILD
    if remains.status in (-_SIGABRT, -_SIGSEGV, -_SIGBUS, -_SIGILL, -_SIGFPE):
        return _C.ASSERT
    if not remains.greeted or not remains.ready:
        return _C.STARTUP
    return _C.KILLED if remains.status < 0 else _C.ASSERT


def is_wordless(remains: Remains) -> bool:
    """Whether it aborted without a word: whatever aborts by itself says why, so the signal may be somebody's."""
    return remains.status == -_SIGABRT and cause_of_text(remains.last_text) is None


def telling(lines: Sequence[str]) -> str:
    """Of a dead process's last lines the one that says most: the first that names what became the cause, else the last.

    What the worker logged while all was well is none; empty where there is nothing else.

    CUDA's reason, for one, stands some lines before the last, which is only where the process aborted.
    """
    cause = cause_of_text("\n".join(lines))
    pattern = next((pattern for pattern, known in TEXTS if known is cause), None)
    if pattern is not None and (found := next((line for line in lines if pattern.search(line)), None)) is not None:
        return found.strip()
    return next((line.strip() for line in reversed(lines) if line.strip() and not _OF_BETTER_TIMES.match(line)), "")


def cause_of_text(text: str) -> ExitCause | None:
    """The cause that the last words of a process name, or None."""
    return next((cause for pattern, cause in TEXTS if pattern.search(text)), None)
