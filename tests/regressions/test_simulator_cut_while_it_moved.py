"""A device that was cut while it moved memory was taken for a mechanism that does not work, until the next start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from inference.devices.checkpoint.checkpoint_support import SimulatorsCarrier
from inference.devices.simgpu.backing import ServerEndedError, Servers
from tests.rigs.processes import children_of, command_of
from tests.rigs.sim_devices import SimDevices

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes can be suspended on Linux only")
SIZE = 2**24
SECONDS = 20.0


def servers_of(devices: SimDevices) -> list[int]:
    return [pid for pid in children_of(devices.process.pid) if "simgpu.rpc_server" in command_of(pid)]


def signalled(devices: SimDevices, number: int) -> list[int]:
    """The servers that were told."""
    for pid in (told := servers_of(devices)):
        os.kill(pid, number)
    return told


FAULTS: dict[str, Callable[[SimDevices], object]] = {
    "cut": lambda devices: devices.tell("cut"),
    "server": lambda devices: signalled(devices, signal.SIGKILL),
    "simulator": lambda devices: devices.process.kill(),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_ends_while_memory_is_moved_says_nothing_against_the_way(fault: str) -> None:
    """The servers stand still, so that the move is under way for certain when the fault comes."""
    with SimDevices(SIZE) as devices:
        carrier = SimulatorsCarrier(devices.socket_path)
        endpoint = devices.status()["endpoint"]
        stopped: list[int] = []
        subject = subprocess.Popen(
            [sys.executable, "-m", "inference.devices.checkpoint.checkpoint_subject", endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert subject.stdout is not None
            assert subject.stdout.readline() == b"ready\n"
            assert await carrier.carry("suspend", "gpu-0", subject.pid, SECONDS) is None
            stopped = signalled(devices, signal.SIGSTOP)
            resuming = asyncio.create_task(carrier.carry("resume", "gpu-0", subject.pid, SECONDS))
            async with asyncio.timeout(SECONDS):
                while devices.status()["suspended_bytes"]:
                    await asyncio.sleep(0.01)
            FAULTS[fault](devices)
            trouble = await resuming
        finally:
            for (
                pid
            ) in stopped:  # one that was just starting would stand still for ever: it has not seen yet whose it is
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            subject.kill()
            subject.communicate()
        assert trouble is not None
        assert trouble.of_state, trouble.why


async def test_no_simulator_at_all_says_nothing_against_the_way_either() -> None:
    with SimDevices(SIZE) as devices:
        carrier = SimulatorsCarrier(devices.socket_path.with_name("nobody"))
        trouble = await carrier.carry("suspend", "gpu-0", os.getpid(), SECONDS)
    assert trouble is not None
    assert trouble.of_state, trouble.why


async def test_a_server_that_ended_before_it_was_asked_is_told_as_that() -> None:
    servers = Servers()
    server = await servers.take()
    try:
        await server.end()
        with pytest.raises(ServerEndedError):
            await server.suspend({})
    finally:
        await servers.close()
