"""Helper job that suspends and resumes the CUDA state of another process, and tests that.

    {"operation": "suspend" | "resume", "pid": PID, "seconds": S}    {"seconds": duration} or {"error": message}
    {"operation": "test", "seconds": S}                              the same

In the test, as with workers, the suspended process is not a child of the suspending one: a system may allow children
only.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from headgate.shared import child_process
from inference.workers.helper_client import HelperError, run_helper

LOCK_SECONDS = 10.0
"""Time for running CUDA calls of the process to end. It is idle, so there are few."""
COUNT_BYTES = 32 * 2**20
"""Data of the process that is suspended by the test."""
LIBRARY = "libcuda.so.1"
MIN_VERSION = 12080
"""The API version of driver 570, the first one with these functions: 1000 x major + 10 x minor."""
FUNCTIONS = (
    "cuCheckpointProcessLock",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
    "cuCheckpointProcessGetState",
)
STATES = ("running", "locked", "checkpointed", "failed")
"""CUprocessState."""
CALL_SECONDS = 10.0


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs one operation."""
    seconds = float(job["seconds"])
    began = time.monotonic()
    try:
        if job["operation"] == "test":
            _test(seconds)
        else:
            _OPERATIONS[job["operation"]](Driver(seconds), int(job["pid"]), seconds)
    except DriverError as error:
        return {"error": str(error)}
    return {"seconds": time.monotonic() - began}


def _suspend(driver: Driver, pid: int, seconds: float) -> None:
    target, lock_seconds = ctypes.c_int(pid), min(LOCK_SECONDS, seconds)
    arguments = LockArgs(timeout_ms=max(1, int(lock_seconds * 1000)))
    driver.call("cuCheckpointProcessLock", target, ctypes.byref(arguments), seconds=lock_seconds + 1.0)
    driver.call("cuCheckpointProcessCheckpoint", target, None, seconds=seconds)
    _expect(driver, pid, "checkpointed")


def _resume(driver: Driver, pid: int, seconds: float) -> None:
    target = ctypes.c_int(pid)
    driver.call("cuCheckpointProcessRestore", target, None, seconds=seconds)
    driver.call("cuCheckpointProcessUnlock", target, None, seconds=seconds)
    _expect(driver, pid, "running")


_OPERATIONS = {"suspend": _suspend, "resume": _resume}


def _expect(driver: Driver, pid: int, wanted: str) -> None:
    if (state := driver.state(pid)) != wanted:
        raise DriverError(f"the driver reports process {pid} as {state}, not {wanted}")


def _test(seconds: float) -> None:
    """Suspends and resumes a process with data on the device, which then verifies its data."""
    Driver(seconds)
    subject = subprocess.Popen(
        [sys.executable, "-m", "inference.devices.checkpoint_job"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, child_process.PARENT_ENV: str(os.getpid())},
    )
    try:
        _expect_line(subject, "ready", "could not be prepared")
        for operation in _OPERATIONS:
            _in_helper(operation, subject.pid, seconds)
        assert subject.stdin is not None
        subject.stdin.write("\n")
        subject.stdin.flush()
        _expect_line(subject, "whole", "has other data after it was resumed")
    finally:
        subject.kill()
        subject.wait()


def _in_helper(operation: str, pid: int, seconds: float) -> None:
    """Runs the operation of the driver in a helper process."""
    job = {"operation": operation, "pid": pid, "seconds": seconds}
    try:
        answer = asyncio.run(run_helper("checkpoint", job, seconds=seconds + 5.0))
    except HelperError as error:
        raise DriverError(str(error)) from None
    if "error" in answer:
        raise DriverError(f"{operation} failed: {answer['error']}")


def _expect_line(subject: subprocess.Popen[str], wanted: str, problem: str) -> None:
    """Has no deadline: at the deadline of this helper the subject is killed with it."""
    assert subject.stdout is not None
    if (line := subject.stdout.readline().strip()) != wanted:
        raise DriverError(f"a process on the device {problem}: {line or 'it ended'}")


# --- the driver -------------------------------------------------------------------------------------------------------
class DriverError(Exception):
    """The library is missing, or a call failed or timed out."""


class LockArgs(ctypes.Structure):
    """CUcheckpointLockArgs: a timeout in milliseconds; the reserved fields must be zero."""

    _fields_ = (
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    )


class Driver:
    """NVIDIA's driver library, initialized. Signatures and numbers are from the reference of the CUDA driver API.

    The timeout of a call without one of its own is `seconds`, at most CALL_SECONDS. Raises DriverError.

    `checkpoints`: whether the driver must support checkpoints.
    """

    def __init__(self, seconds: float = CALL_SECONDS, *, checkpoints: bool = True) -> None:
        self._seconds = min(seconds, CALL_SECONDS)
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise DriverError(f"cannot open {LIBRARY} ({error})") from None
        if checkpoints:
            self._expect_checkpoints()
        self.call("cuInit", ctypes.c_uint(0))

    def _expect_checkpoints(self) -> None:
        if missing := [name for name in FUNCTIONS if not hasattr(self._library, name)]:
            raise DriverError(f"the driver is older than 570: it has no {missing[0]}")
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        if version.value < MIN_VERSION:
            raise DriverError(f"the driver is older than 570: its API is {version.value}, not {MIN_VERSION}")

    def call(self, name: str, *arguments: Any, seconds: float | None = None, context: Any = None) -> float:
        """Calls a function, within `context` if given, and returns its duration in seconds. A call that times out
        continues in its thread until this process ends.
        """
        results: list[int] = []
        took: list[float] = []
        seconds = self._seconds if seconds is None else seconds
        function = getattr(self._library, name)

        def do() -> None:
            if context is not None and (code := self._library.cuCtxSetCurrent(context)):
                results.append(code)
            else:
                began = time.perf_counter()
                code = function(*arguments)
                took.append(time.perf_counter() - began)
                results.append(code)

        thread = threading.Thread(target=do, name=name, daemon=True)
        thread.start()
        thread.join(seconds)
        if not results:
            raise DriverError(f"{name} did not return within {seconds:g} s")
        if results[0]:
            raise DriverError(f"{name} failed with {self._name(results[0])}")
        return took[0]

    def state(self, pid: int) -> str:
        """The state of a process in the driver: one of STATES."""
        state = ctypes.c_int()
        self.call("cuCheckpointProcessGetState", ctypes.c_int(pid), ctypes.byref(state))
        return STATES[state.value] if 0 <= state.value < len(STATES) else f"state {state.value}"

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text)) or not text.value:
            return f"CUresult {code}"
        return f"{text.value.decode('utf-8', 'replace')} ({code})"


# --- the suspended process --------------------------------------------------------------------------------------------
def main() -> int:
    """The process that the test suspends: `python -m inference.devices.checkpoint_job`.

    It puts data on the first NVIDIA GPU and writes `ready` to stdout. After a line on stdin it writes `whole` or an
    error. Returns 0 when the data is unchanged.
    """
    child_process.die_with_parent(os.environ)
    pattern = os.urandom(4096) * (COUNT_BYTES // 4096)
    kept = _on_nvidia(pattern)
    try:
        next(kept)
        _print("ready")
        sys.stdin.readline()
        is_whole = next(kept) == pattern
    except DriverError as error:
        _print(str(error))
        return 1
    _print("whole" if is_whole else "its bytes changed")
    return 0 if is_whole else 1


def _on_nvidia(pattern: bytes) -> Iterator[bytes]:
    """Writes `pattern` to the device, then reads it back. Raises DriverError."""
    driver = Driver()
    size = ctypes.c_size_t(len(pattern))
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    driver.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    found = ctypes.create_string_buffer(len(pattern))
    driver.call("cuMemAlloc_v2", ctypes.byref(address), size, context=context)
    driver.call("cuMemcpyHtoD_v2", address, pattern, size, context=context)
    yield b""
    driver.call("cuMemcpyDtoH_v2", found, address, size, context=context)
    yield found.raw


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
