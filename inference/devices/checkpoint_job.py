"""Suspends and resumes another process's CUDA state through the driver, and tries that out; decides nothing.

    {"operation": "suspend" | "resume", "pid": PID, "seconds": S}    {"seconds": took} or {"error": sentence}
    {"operation": "test", "seconds": S}                              the same

With `"simulator": {"socket": PATH, "device": ID, "endpoint": HOST:PORT}` the test is of a simulated device. The test
suspends a process that is no child of the one that suspends, because workers are none of a helper's either, and a
system may allow the one and forbid the other.
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
from inference.devices.cuda_driver import Driver, DriverError, LockArgs
from inference.devices.simgpu.control import Control, SimulatorError
from inference.helpers.helper_client import HelperError, run_helper

LOCK_SECONDS = 10.0
"""For the calls that run in the process to end; nobody uses it, so there are hardly any."""


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """One operation."""
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
        raise DriverError(f"the driver says that process {pid} is {state}, not {wanted}")


def _test(seconds: float, simulator: Mapping[str, str] | None) -> None:
    """A process with bytes on the device is suspended and resumed, and finds its bytes."""
    carry: Callable[[str, int, float], None] = _helped
    if simulator is None:
        Driver(seconds)
    else:
        carry = functools.partial(_simulated, simulator)
    where = () if simulator is None else (simulator["endpoint"],)
    subject = subprocess.Popen(
        [sys.executable, "-m", "inference.devices.checkpoint_subject", *where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, child_process.PARENT_ENV: str(os.getpid())},
    )
    try:
        _hear(subject, "ready", "could not be prepared")
        for operation in _OPERATIONS:
            carry(operation, subject.pid, seconds)
        assert subject.stdin is not None
        subject.stdin.write("\n")
        subject.stdin.flush()
        _hear(subject, "whole", "was not what it had been once it was resumed")
    finally:
        subject.kill()
        subject.wait()


def _helped(operation: str, pid: int, seconds: float) -> None:
    """By the driver, in a helper of its own."""
    job = {"operation": operation, "pid": pid, "seconds": seconds}
    try:
        answer = asyncio.run(run_helper("checkpoint", job, seconds=seconds + 5.0))
    except HelperError as error:
        raise DriverError(str(error)) from None
    if "error" in answer:
        raise DriverError(f"{operation} did not work: {answer['error']}")


def _simulated(simulator: Mapping[str, str], operation: str, pid: int, seconds: float) -> None:
    """By the simulator, whose count of bytes has to say so."""
    device = simulator["device"]
    try:
        with Control(Path(simulator["socket"]), seconds) as control:
            status = control.tell(operation, device, pid=pid)[device]
    except SimulatorError as error:
        raise DriverError(f"{operation} did not work: {error}") from None
    if bool(status["suspended_bytes"]) != (operation == "suspend"):
        raise DriverError(f"{operation} left {status['suspended_bytes']} bytes suspended on {device}")


def _hear(subject: subprocess.Popen[str], wanted: str, otherwise: str) -> None:
    """The helper's own deadline is the subject's: it is killed with its parent."""
    assert subject.stdout is not None
    if (said := subject.stdout.readline().strip()) != wanted:
        raise DriverError(f"a process on the device {otherwise}: {said or 'it ended'}")
