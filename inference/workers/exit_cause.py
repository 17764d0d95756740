"""Classifies the end of a worker process from its exit status and its last output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from inference.protocol import ExitCause
from inference.worker_link import Heartbeat


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker ended.

    `message` is one sentence, `last_lines` the end of its output, `status` the exit status or minus the signal number.
    `starved`: the kernel killed it because host memory ran out. `silent_abort`: it got SIGABRT without an error
    message, so another process may have sent it. `beat` is its last heartbeat.
    """

    cause: ExitCause
    status: int
    message: str
    last_lines: tuple[str, ...]
    was_ready: bool
    starved: bool = False
    silent_abort: bool = False
    beat: Heartbeat | None = None


_C = ExitCause
TEXTS: Sequence[tuple[re.Pattern[str], ExitCause]] = [
    # The device is lost: CUDA, Metal, ROCm, Vulkan, ggml's RPC backend. An illegal address, a failed launch or a
    # device-side assertion ends the context of one process; the device still works.
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
    # Out of memory while computing: CUDA aborts, Metal and ROCm report a failed command buffer.
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
    # Out of memory while loading, reported as an error.
    (
        re.compile(
            r"failed to allocate (buffer|\w+ buffer|CUDA\S* buffer)|unable to allocate|failed to allocate compute"
            r"|cudaMalloc failed|ggml_backend_\w+_buffer_type_alloc_buffer|failed to allocate memory"
            r"|Device memory allocation of size \d+ failed|ErrorOutOf(Device|Host)Memory",
            re.IGNORECASE,
        ),
        _C.OOM_LOAD,
    ),
    # Intentional aborts: checks of ggml, driver libraries, C and C++ libraries, interpreters.
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

_ROUTINE_LOG_LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (debug|info) ")
"""Lines of the worker's own log that do not explain its end."""
_SIGABRT, _SIGKILL, _SIGBUS, _SIGSEGV, _SIGILL, _SIGFPE, _SIGTERM = 6, 9, 7, 11, 4, 8, 15


@dataclass(frozen=True, slots=True)
class ExitEvidence:
    """What is known about an ended worker.

    `status`: exit status, or minus the signal number. `requested`, `hang`: the service ended it. `failed_cause`: the
    cause in its `failed` message. `hello_received`, `ready`: how far the start had come. `has_computed`: it completed a
    step of a request. `build_is_trusted`: llama.cpp passed its check after a worker had crashed at its first step.
    """

    status: int
    requested: bool = False
    hang: bool = False
    failed_cause: str | None = None
    hello_received: bool = True
    ready: bool = True
    has_computed: bool = True
    build_is_trusted: bool = False
    last_text: str = ""


def classify(evidence: ExitEvidence) -> ExitCause:
    """The cause. Knowledge of worker and service comes first, then SIGKILL, the output, and the other exit statuses."""
    if evidence.hang:
        return _C.HANG
    if evidence.failed_cause is not None:
        return ExitCause(evidence.failed_cause) if evidence.failed_cause in set(ExitCause) else _C.STARTUP
    if evidence.requested or (evidence.status == 0 and evidence.ready):
        return _C.REQUESTED
    if evidence.status == -_SIGKILL:
        return _C.KILLED
    by_text = cause_of_text(evidence.last_text)
    if by_text is not None:
        if by_text in (_C.OOM_COMPUTE, _C.OOM_LOAD):
            return _C.OOM_COMPUTE if evidence.ready else _C.OOM_LOAD
        return by_text
    if evidence.status in (-_SIGILL, -_SIGSEGV) and not (evidence.has_computed or evidence.build_is_trusted):
        return _C.BROKEN_BUILD
    if evidence.status in (-_SIGABRT, -_SIGSEGV, -_SIGBUS, -_SIGILL, -_SIGFPE):
        return _C.ASSERT
    if not evidence.hello_received or not evidence.ready:
        return _C.STARTUP
    return _C.KILLED if evidence.status < 0 else _C.ASSERT


def is_silent_abort(evidence: ExitEvidence) -> bool:
    """Whether it got SIGABRT without an error message. An abort prints one, so another process may have sent it."""
    return evidence.status == -_SIGABRT and cause_of_text(evidence.last_text) is None


def most_telling_line(lines: Sequence[str]) -> str:
    """The line that explains the end best: the first one that matches the cause, else the last one.

    The reason of CUDA, for example, is some lines before the last line. Routine log lines are ignored; the result is
    empty when there is no other line.
    """
    cause = cause_of_text("\n".join(lines))
    pattern = next((pattern for pattern, known in TEXTS if known is cause), None)
    if pattern is not None and (found := next((line for line in lines if pattern.search(line)), None)) is not None:
        return found.strip()
    return next((line.strip() for line in reversed(lines) if line.strip() and not _ROUTINE_LOG_LINE.match(line)), "")


def cause_of_text(text: str) -> ExitCause | None:
    """The cause that the output of a process indicates, or None."""
    return next((cause for pattern, cause in TEXTS if pattern.search(text)), None)
