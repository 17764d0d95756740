"""Suspends and resumes processes on the devices that support it.

On NVIDIA GPUs a helper calls the driver (`inference.devices.checkpoint_job`); on simulated devices the
simulator does it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from inference.devices.device import Reading
from inference.devices.simgpu.control import SimulatorError, send_command
from inference.workers.helper_client import HelperError, run_helper

TEST_SECONDS = 60.0
"""Timeout of a complete test: three processes start, and a driver can need seconds for its first context."""
CALL_SECONDS = 15.0
"""Timeout of each call of a test."""
SPARE_SECONDS = 10.0
"""Added for the start of the helper to the timeouts of its calls."""


@dataclass(frozen=True, slots=True)
class SuspensionFailure:
    """Why a process could not be suspended or resumed. Its state is then unknown.

    `by_device_state`: the cause is the current state of the device, such as too little memory. A later attempt may
    succeed.
    """

    why: str
    by_device_state: bool = False


class Suspender(Protocol):
    """Suspends and resumes processes on one kind of device. Methods return None on success."""

    label: str
    """Name for messages, such as `the NVIDIA driver`."""

    async def test(self, device: Reading) -> SuspensionFailure | None:
        """Tests whether both operations work here."""
        ...

    async def run(self, operation: str, device: str, pid: int, seconds: float) -> SuspensionFailure | None:
        """Runs `operation` (suspend or resume) on `pid`, which uses only this device. `seconds` limits one copy."""
        ...


class DriverSuspender:
    """Uses the checkpoints of NVIDIA's driver."""

    label = "the NVIDIA driver"

    async def test(self, device: Reading) -> SuspensionFailure | None:  # noqa: D102
        return await _run_job({"operation": "test", "seconds": CALL_SECONDS}, TEST_SECONDS)

    async def run(self, operation: str, device: str, pid: int, seconds: float) -> SuspensionFailure | None:  # noqa: D102
        job = {"operation": operation, "pid": pid, "seconds": seconds}
        return await _run_job(job, 3 * seconds + SPARE_SECONDS)


class SimulatorSuspender:
    """Uses the simulator that listens at `socket_path`."""

    label = "the simulator"

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path

    async def test(self, device: Reading) -> SuspensionFailure | None:  # noqa: D102
        return (
            None if sys.platform == "linux" else SuspensionFailure("simulated devices suspend processes on Linux only")
        )

    async def run(self, operation: str, device: str, pid: int, seconds: float) -> SuspensionFailure | None:  # noqa: D102
        try:
            await send_command(self._socket_path, operation, device, seconds=seconds, pid=pid)
        except SimulatorError as error:
            return SuspensionFailure(str(error), error.by_device_state)
        return None


async def _run_job(job: Mapping[str, Any], seconds: float) -> SuspensionFailure | None:
    """Runs the job in a helper."""
    try:
        answer = await run_helper("checkpoint", job, seconds=seconds)
    except HelperError as error:
        return SuspensionFailure(str(error))
    return SuspensionFailure(str(answer["error"])) if "error" in answer else None
