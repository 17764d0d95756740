"""Helper job that suspends and resumes the CUDA state of another process, and tests that.

    {"operation": "suspend" | "resume", "pid": PID, "seconds": S}    {"seconds": duration} or {"error": message}
    {"operation": "test", "seconds": S}                              the same

With `"simulator": {"socket": PATH, "device": ID, "endpoint": HOST:PORT}` the test uses a simulated device. The test
suspends a process that is not a child of the suspending one, like workers, because a system may allow the one and
forbid the other.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headgate.shared import child_process
from inference.devices.checkpoint.cuda_driver import Driver, DriverError, LockArgs
from inference.devices.simgpu.control import Control, SimulatorError
from inference.workers.helper_client import HelperError, run_helper

LOCK_SECONDS = 10.0
"""Time for running CUDA calls of the process to end. It is idle, so there are few."""


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs one operation."""
    seconds = float(job["seconds"])
    began = time.monotonic()
    try:
        if job["operation"] == "test":
            _test(seconds, job.get("simulator"))
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


def _test(seconds: float, simulator: Mapping[str, str] | None) -> None:
    """Suspends and resumes a process with data on the device, which then verifies its data."""
    carry: Callable[[str, int, float], None] = _in_helper
    if simulator is None:
        Driver(seconds)
    else:
        carry = functools.partial(_in_simulator, simulator)
    arguments = () if simulator is None else (simulator["endpoint"],)
    subject = subprocess.Popen(
        [sys.executable, "-m", "inference.devices.checkpoint.checkpoint_subject", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, child_process.PARENT_ENV: str(os.getpid())},
    )
    try:
        _expect_line(subject, "ready", "could not be prepared")
        for operation in _OPERATIONS:
            carry(operation, subject.pid, seconds)
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


def _in_simulator(simulator: Mapping[str, str], operation: str, pid: int, seconds: float) -> None:
    """Runs the operation of the simulator and checks its count of suspended bytes."""
    device = simulator["device"]
    try:
        with Control(Path(simulator["socket"]), seconds) as control:
            status = control.tell(operation, device, pid=pid)[device]
    except SimulatorError as error:
        raise DriverError(f"{operation} failed: {error}") from None
    if bool(status["suspended_bytes"]) != (operation == "suspend"):
        raise DriverError(f"{operation} left {status['suspended_bytes']} bytes suspended on {device}")


def _expect_line(subject: subprocess.Popen[str], wanted: str, problem: str) -> None:
    """Has no deadline: at the deadline of this helper the subject is killed with it."""
    assert subject.stdout is not None
    if (line := subject.stdout.readline().strip()) != wanted:
        raise DriverError(f"a process on the device {problem}: {line or 'it ended'}")
