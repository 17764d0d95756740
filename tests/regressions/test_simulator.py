"""Faults of simulated devices during transfers and commands."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from inference.devices.checkpoint_support import SimulatorSuspender
from inference.devices.simgpu.backing import ServerEndedError, Servers
from inference.devices.simgpu.probe import SimProbe
from inference.protocol import DeviceState
from tests.rigs.processes import command_of, descendants_of
from tests.rigs.sim_devices import SimDevices

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes can be suspended on Linux only")

SIZE = 2**24
SECONDS = 20.0


def servers_of(devices: SimDevices) -> list[int]:
    return [pid for pid in descendants_of(devices.process.pid) if "simgpu.rpc_server" in command_of(pid)]


def signalled(devices: SimDevices, number: int) -> list[int]:
    """Sends the signal to all servers of the simulator; returns their pids."""
    for pid in (servers := servers_of(devices)):
        os.kill(pid, number)
    return servers


FAULTS: dict[str, Callable[[SimDevices], object]] = {
    "cut": lambda devices: devices.send("cut"),
    "server": lambda devices: signalled(devices, signal.SIGKILL),
    "simulator": lambda devices: devices.process.kill(),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_device_lost_during_a_transfer_does_not_disable_checkpoints(fault: str) -> None:
    """The servers are stopped, so that the transfer runs when the fault occurs."""
    with SimDevices(SIZE) as devices:
        suspender = SimulatorSuspender(devices.socket_path)
        endpoint = devices.status()["endpoint"]
        stopped: list[int] = []
        subject = subprocess.Popen(
            [sys.executable, "-m", "tests.rigs.sim_subject", endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert subject.stdout is not None
            assert subject.stdout.readline() == b"ready\n"
            assert await suspender.run("suspend", "gpu-0", subject.pid, SECONDS) is None
            stopped = signalled(devices, signal.SIGSTOP)
            resuming = asyncio.create_task(suspender.run("resume", "gpu-0", subject.pid, SECONDS))
            async with asyncio.timeout(SECONDS):
                while devices.status()["suspended_bytes"]:
                    await asyncio.sleep(0.01)
            FAULTS[fault](devices)
            failure = await resuming
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            subject.kill()
            subject.communicate()
        assert failure is not None
        assert failure.by_device_state, failure.why


async def test_missing_simulator_does_not_disable_checkpoints() -> None:
    with SimDevices(SIZE) as devices:
        suspender = SimulatorSuspender(devices.socket_path.with_name("missing"))
        failure = await suspender.run("suspend", "gpu-0", os.getpid(), SECONDS)
    assert failure is not None
    assert failure.by_device_state, failure.why


async def test_command_to_an_ended_server_raises_server_ended() -> None:
    servers = Servers()
    server = await servers.take()
    try:
        await server.end()
        with pytest.raises(ServerEndedError):
            await server.suspend({})
    finally:
        await servers.close()


async def test_cancelled_simulator_command_does_not_affect_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    probe = SimProbe([2**20])
    await probe.start()
    try:
        status = asyncio.create_task(probe.send("status"))
        await asyncio.sleep(0)
        status.cancel()
        await asyncio.wait({status})
        assert status.cancelled()
        await probe.refresh()
        assert [reading.state for reading in probe.readings()] == [DeviceState.HEALTHY]
        with caplog.at_level(logging.ERROR):
            await asyncio.gather(probe.refresh(), probe.close())
        assert not caplog.records, "a command cancelled by the shutdown is not a lost device"
    finally:
        await probe.close()
