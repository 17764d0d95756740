"""Carries out the suspending and resuming of a process, for each kind of device that can; decides neither who nor when.

On NVIDIA GPUs the driver does it, asked by a helper; on simulated devices the simulator, asked over its socket. Both
are tried out by a process with bytes on a device, which has to find them again (`inference.devices.checkpoint_job`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from inference.devices.device import Reading
from inference.devices.simgpu.control import SimulatorError, told
from inference.helpers.helper_client import HelperError, run_helper

TEST_SECONDS = 60.0
"""For a whole test: three processes start, and a driver may need seconds for its first context."""
CALL_SECONDS = 15.0
"""For each call of a test."""
SPARE_SECONDS = 10.0
"""Of a helper beyond the deadline of its calls: it has to start."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a process was not suspended or resumed; it is in no known state.

    `of_state`: as things are on its device, such as for want of room, which says nothing against the way as such.
    """

    why: str
    of_state: bool = False


class Carrier(Protocol):
    """`operation` is suspend or resume. None comes back when all is well."""

    who: str
    """does it, in words"""

    async def test(self, device: Reading) -> Trouble | None:
        """Suspends and resumes a process of its own that has bytes there."""
        ...

    async def carry(self, operation: str, device: str, pid: int, seconds: float) -> Trouble | None:
        """Suspends or resumes `pid`, which uses this device alone; `seconds` is the deadline of one copy."""
        ...


class DriversCarrier:
    """NVIDIA's driver."""

    who = "the NVIDIA driver"

    async def test(self, device: Reading) -> Trouble | None:  # noqa: D102
        return await _asked({"operation": "test", "seconds": CALL_SECONDS}, TEST_SECONDS)

    async def carry(self, operation: str, device: str, pid: int, seconds: float) -> Trouble | None:  # noqa: D102
        job = {"operation": operation, "pid": pid, "seconds": seconds}
        return await _asked(job, 3 * seconds + SPARE_SECONDS)


class SimulatorsCarrier:
    """The simulator that listens at `socket_path`."""

    who = "the simulator"

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path

    async def test(self, device: Reading) -> Trouble | None:  # noqa: D102
        job = {
            "operation": "test",
            "seconds": CALL_SECONDS,
            "simulator": {
                "socket": str(self._socket_path),
                "device": device.id,
                "endpoint": device.rpc_endpoint,
            },
        }
        return await _asked(job, TEST_SECONDS)

    async def carry(self, operation: str, device: str, pid: int, seconds: float) -> Trouble | None:  # noqa: D102
        try:
            await told(self._socket_path, operation, device, seconds=seconds, pid=pid)
        except SimulatorError as error:
            return Trouble(str(error), error.of_state)
        return None


async def _asked(job: Mapping[str, Any], seconds: float) -> Trouble | None:
    """What a helper says is wrong, or None."""
    try:
        answer = await run_helper("checkpoint", job, seconds=seconds)
    except HelperError as error:
        return Trouble(str(error))
    return Trouble(str(answer["error"])) if "error" in answer else None
