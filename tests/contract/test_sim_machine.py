"""A simulated machine with devices and a driver: the signs of each fault, and its end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.devices.nvml_reader import NvmlReader
from inference.devices.reopen_policy import MAX_SECONDS
from inference.devices.signs import Sign
from inference.workers.helper_client import HelperError
from tests.rigs.sim_devices import SimDevices
from tests.rigs.sim_machine import TROUBLES, SimMachine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the NVML stub is a Linux library")

MIB = 2**20
FINE, DEAD, GONE = Sign.HEALTHY, Sign.FAILED, Sign.MISSING
EXPECTED = {
    "application-fault": (FINE, FINE),
    "killed-process": (FINE, FINE),
    "double-bit-error": (Sign.DEGRADED, FINE),
    "uncontained-error": (DEAD, FINE),
    "firmware-timeout": (DEAD, FINE),
    "off-the-bus": (DEAD, FINE),
    "unlisted": (GONE, FINE),
    "driver-reset": (DEAD, DEAD),
    "driver-replaced": (Sign.DEGRADED, Sign.DEGRADED),
    "out-of-reach": (Sign.UNCERTAIN, Sign.UNCERTAIN),
    "hung-driver": (Sign.UNCERTAIN, Sign.UNCERTAIN),
}


@pytest.fixture(scope="module")
def devices() -> Iterator[SimDevices]:
    with SimDevices(600 * MIB, 1024 * MIB) as devices:
        yield devices


@pytest.fixture
def machine(devices: SimDevices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimMachine]:
    machine = SimMachine(tmp_path, devices.control, reserved_bytes=8 * MIB)
    for name, value in machine.env.items():
        monkeypatch.setenv(name, value)
    yield machine
    machine.restore()


async def test_each_fault_has_its_sign_and_the_devices_are_healthy_after_it(machine: SimMachine) -> None:
    """On the affected device or on all; afterwards all are healthy without a new probe."""
    assert EXPECTED.keys() == TROUBLES.keys()
    now = 0.0
    probe = machine.probe(NvmlReader(next_seconds=0.3, clock=lambda: now))
    noticed = asyncio.Event()
    probe.listen(noticed.set)
    await probe.start()
    found: dict[str, tuple[Sign, ...]] = {}
    for name, trouble in TROUBLES.items():
        noticed.clear()
        machine.strike(name, "gpu-0")
        if trouble.xids:
            await asyncio.wait_for(noticed.wait(), 10)
        await probe.refresh()
        found[name] = tuple(reading.sign for reading in probe.readings())
        machine.restore()
        for _ in range(3):  # the child that gets the loss, and the next one
            now += MAX_SECONDS
            await probe.refresh()
        assert [reading.sign for reading in probe.readings()] == [FINE, FINE], name
    assert found == EXPECTED
    await probe.close()


async def test_trial_passes_if_the_device_computes(machine: SimMachine) -> None:
    """Also on a device that is full or unreadable for NVML, but not on a lost one. The trial frees its memory."""
    probe = machine.probe()
    await probe.start()
    machine.strike("out-of-reach", "gpu-0")
    await probe.refresh()
    await asyncio.gather(probe.trial("gpu-0"), probe.trial("gpu-1"))
    machine.restore()
    machine.send("refuse", "gpu-0")
    await probe.trial("gpu-0")
    machine.send("heal")
    machine.strike("off-the-bus", "gpu-1")
    with pytest.raises(HelperError, match=r"trial of gpu-1 failed: the device at .* does not answer"):
        await probe.trial("gpu-1")
    machine.restore()
    assert {device["used_bytes"] for device in machine.sync().values()} == {0}
    await probe.close()
