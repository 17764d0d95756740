"""Guarantees of every probe, real or simulated: one name per device, correct figures, and no remaining processes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from headgate.shared.errors import ConfigError, HeadgateError
from inference.devices.device import Reading
from inference.devices.device_probe import Probe
from inference.devices.ggml_devices import GgmlProbe
from inference.devices.host import CpuProbe
from inference.devices.inventory import Inventory
from inference.devices.signs import Sign
from inference.devices.simgpu.control import Control, SimulatorError
from inference.devices.simgpu.probe import SimProbe
from inference.environment_settings import InferenceSettings
from tests.rigs.processes import descendants_of, is_alive, wait_until
from tests.rigs.sim_devices import SimDevices
from tests.rigs.sim_machine import SimMachine

pytestmark = pytest.mark.unmeasured

MIB = 2**20
SIZES = (600 * MIB, 1024 * MIB)
Open = Callable[[Path, pytest.MonkeyPatch], AbstractAsyncContextManager[Probe]]


@asynccontextmanager
async def cpu(_root: Path, _patch: pytest.MonkeyPatch) -> AsyncIterator[Probe]:
    yield CpuProbe()


@asynccontextmanager
async def this_machine(_root: Path, _patch: pytest.MonkeyPatch) -> AsyncIterator[Probe]:
    """The accelerators of this machine: usually none."""
    yield GgmlProbe()


@asynccontextmanager
async def nvidia(root: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[Probe]:
    """Figures of NVML on a simulated machine."""
    with SimDevices(*SIZES) as devices:
        machine = SimMachine(root, devices.control, reserved_bytes=8 * MIB)
        for name, value in machine.env.items():
            patch.setenv(name, value)
        yield GgmlProbe({}, listing=machine.listing)


@asynccontextmanager
async def simulated(_root: Path, _patch: pytest.MonkeyPatch) -> AsyncIterator[Probe]:
    yield SimProbe(SIZES)


KINDS = [
    pytest.param(cpu, id="cpu"),
    pytest.param(this_machine, id="this-machine"),
    pytest.param(nvidia, id="nvidia", marks=pytest.mark.skipif(sys.platform != "linux", reason="the stub needs Linux")),
    pytest.param(simulated, id="simulated"),
]


@pytest.mark.parametrize("open_probe", KINDS)
async def test_every_probe_has_stable_identities_and_plausible_figures(
    open_probe: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and identities stay the same between readings, figures are plausible, and no process survives `close`."""
    async with open_probe(tmp_path, monkeypatch) as probe:
        before = set(descendants_of(os.getpid()))
        await probe.start()
        first = probe.readings()
        await probe.refresh()
        second = probe.readings()
        assert [identity(reading) for reading in second] == [identity(reading) for reading in first]
        assert len({reading.id for reading in first}) == len(first)
        for reading in second:
            assert reading.sign is Sign.HEALTHY
            assert 0 <= reading.free_bytes <= reading.total_bytes
            assert abs(reading.free_bytes + reading.used_bytes - reading.total_bytes) <= reading.total_bytes // 100
            assert reading.name
            assert reading.to_json()["state"] == "healthy"
        if open_probe in (nvidia, simulated):
            assert [reading.total_bytes for reading in second] == list(SIZES)
            assert [reading.id for reading in second] == ["gpu-0", "gpu-1"]
        await probe.close()
        assert set(descendants_of(os.getpid())) <= before
        assert probe.readings() is not None


def identity(reading: Reading) -> tuple[object, ...]:
    return reading.id, reading.kind, reading.uuid, reading.ggml_name, dict(reading.environment)


@pytest.mark.skipif(sys.platform != "linux", reason="the NVML stub is a Linux library")
async def test_simulator_and_nvml_describe_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same UUIDs and figures at every moment, foreign use and losses included."""
    simulated = SimProbe(SIZES)
    await simulated.start()
    with Control(simulated.socket_path) as control:
        machine = SimMachine(tmp_path, control)
        for name, value in machine.env.items():
            monkeypatch.setenv(name, value)
        nvidia = GgmlProbe({}, listing=machine.listing)
        await nvidia.start()
        for command in ({}, {"do": "foreign", "device": "gpu-1", "bytes": 100 * MIB}, {"do": "shrink", "bytes": MIB}):
            machine.send(**{"do": "status", **command})
            await simulated.refresh()
            await nvidia.refresh()
            assert [figures(reading) for reading in nvidia.readings()] == [
                figures(reading) for reading in simulated.readings()
            ]
        machine.send("cut", "gpu-0")
        await nvidia.refresh()
        await simulated.refresh()
        assert [reading.sign for reading in simulated.readings()] == [Sign.FAILED, Sign.HEALTHY]
        assert [reading.sign for reading in nvidia.readings()] == [Sign.FAILED, Sign.HEALTHY]
        assert "(15)" in nvidia.readings()[0].note
        machine.send("heal")
        await nvidia.refresh()
        await simulated.refresh()
        assert {reading.sign for reading in (*simulated.readings(), *nvidia.readings())} == {Sign.HEALTHY}
    await nvidia.close()
    await simulated.close()


def figures(reading: Reading) -> tuple[object, ...]:
    return (
        reading.id,
        reading.uuid,
        reading.total_bytes,
        reading.free_bytes,
        min(reading.used_bytes, reading.total_bytes),
    )


async def test_end_of_the_simulator_loses_its_devices_without_a_hang() -> None:
    """The loss is noticed without a request, commands are answered quickly, and other figures stay."""
    probe = SimProbe(SIZES)
    noticed = asyncio.Event()
    probe.listen(noticed.set)
    await probe.start()
    assert probe.pid is not None
    servers = descendants_of(probe.pid)
    os.kill(probe.pid, 9)
    await asyncio.wait_for(noticed.wait(), 10)
    assert {reading.sign for reading in probe.readings()} == {Sign.MISSING}
    with pytest.raises(HeadgateError, match="has ended"):
        await probe.send("status")
    await probe.refresh()
    assert {reading.sign for reading in probe.readings()} == {Sign.MISSING}
    assert [reading.total_bytes for reading in probe.readings()] == list(SIZES)
    wait_until("its servers end", lambda: not any(is_alive(pid) for pid in servers))
    wait_until("the socket is closed", lambda: _is_refused(probe.socket_path))
    await probe.close()


def _is_refused(path: Path) -> bool:
    """The kernel may close the sockets of a killed process a moment later."""
    try:
        with Control(path):
            return False
    except SimulatorError as error:
        return "no simulated device answers" in str(error)


async def test_simulator_restarts_after_its_loss_was_reported() -> None:
    """Its devices are empty, have the same identity and compute. After a second end the restart is delayed."""
    probe = SimProbe(SIZES)
    noticed = asyncio.Event()
    probe.listen(noticed.set)
    await probe.start()
    await probe.send("foreign", "gpu-0", bytes=MIB)
    await probe.refresh()
    before = [identity(reading) for reading in probe.readings()]
    first = await ended(probe, noticed)
    await probe.refresh()
    assert ({reading.sign for reading in probe.readings()}, probe.pid) == ({Sign.MISSING}, first)
    await asyncio.gather(probe.refresh(), probe.refresh())
    assert {reading.sign for reading in probe.readings()} == {Sign.HEALTHY}
    assert [identity(reading) for reading in probe.readings()] == before
    assert probe.readings()[0].used_bytes == 0
    await probe.trial("gpu-0")
    second = await ended(probe, noticed)
    for _ in range(2):
        await probe.refresh()
    assert ({reading.sign for reading in probe.readings()}, probe.pid) == ({Sign.MISSING}, second)
    await probe.renew()
    await probe.refresh()
    assert {reading.sign for reading in probe.readings()} == {Sign.HEALTHY}
    await probe.close()
    assert not [pid for pid in (first, second) if is_alive(pid)]


async def ended(probe: SimProbe, noticed: asyncio.Event) -> int:
    """Kills the simulator; returns its process."""
    pid = probe.pid
    assert pid is not None
    noticed.clear()
    os.kill(pid, 9)
    await asyncio.wait_for(noticed.wait(), 10)
    return pid


async def test_trial_of_the_host_succeeds() -> None:
    """A helper computes and compares, as for every other device."""
    await CpuProbe().trial("cpu")


async def test_inventory_uses_the_probe_of_the_device_for_trials() -> None:
    first, second = RecordingProbe("gpu-0"), RecordingProbe("cpu")
    inventory = Inventory([first, second])
    notices: list[str] = []
    inventory.listen(lambda: notices.append("now"))
    first.on_event()
    await inventory.trial("cpu")
    await inventory.renew()
    assert (first.done, second.done, notices) == (["renew"], ["trial cpu", "renew"], ["now"])


async def test_simultaneous_readings_run_one_after_the_other() -> None:
    """An event is part of one reading only, and a second reading must not replace it before it is seen."""
    paper = RecordingProbe("gpu-0")
    inventory = Inventory([paper])
    seen: list[Sign] = []

    async def read() -> None:
        await inventory.refresh()
        seen.append(inventory.measured()[0].sign)

    paper.next_signs = [Sign.FAILED, Sign.HEALTHY]
    await asyncio.gather(read(), read())
    assert seen == [Sign.FAILED, Sign.HEALTHY]


class RecordingProbe(CpuProbe):
    """A probe that records its calls."""

    def __init__(self, id: str) -> None:
        super().__init__()
        self.id = id
        self.done: list[str] = []
        self.on_event: Callable[[], None] = lambda: None
        self.sign, self.next_signs = Sign.HEALTHY, [Sign.HEALTHY]

    async def refresh(self) -> None:
        await asyncio.sleep(0)
        self.sign = self.next_signs.pop(0)
        await asyncio.sleep(0)

    def listen(self, on_event: Callable[[], None]) -> None:
        self.on_event = on_event

    async def renew(self) -> None:
        self.done.append("renew")

    async def trial(self, device: str) -> None:
        self.done.append(f"trial {device}")

    def readings(self) -> tuple[Reading, ...]:
        return (Reading(self.id, "cuda", "paper", 0, 0, 0, sign=self.sign),)


async def test_refused_command_of_the_simulator_has_its_message() -> None:
    probe = SimProbe(SIZES)
    await probe.start()
    with pytest.raises(HeadgateError, match="other processes can use 0 to 629145600 bytes"):
        await probe.send("foreign", "gpu-0", bytes=2**40)
    with Control(probe.socket_path) as control, pytest.raises(SimulatorError, match="did you mean stall"):
        control.send("stal")
    await probe.refresh()
    assert {reading.sign for reading in probe.readings()} == {Sign.HEALTHY}
    await probe.close()


async def test_simulator_that_cannot_start_is_reported(tmp_path: Path) -> None:
    """The directory of its socket is missing."""
    before = set(descendants_of(os.getpid()))
    probe = SimProbe(SIZES, tmp_path / "missing")
    with pytest.raises(HeadgateError, match="did not start"):
        await probe.start()
    assert set(descendants_of(os.getpid())) <= before


async def test_llama_cpp_without_rpc_is_reported_with_the_missing_flag(tmp_path: Path) -> None:
    (tmp_path / "libggml.so").write_bytes(b"no such symbol in here")
    probe = SimProbe(SIZES, engine=tmp_path)
    with pytest.raises(ConfigError, match=r"INFERENCE_DEVICES: .*CMAKE_ARGS=-DGGML_RPC=ON"):
        await probe.start()
    assert probe.pid is None
    await probe.close()


@pytest.mark.parametrize(
    ("setting", "ids"),
    [
        ({"devices": "cpu"}, ["cpu"]),
        ({"force_cpu_mode": True, "devices": "sim:2x600MiB"}, ["cpu"]),
        ({"devices": "sim:2x600MiB,1GiB"}, ["gpu-0", "gpu-1", "gpu-2", "cpu"]),
    ],
)
async def test_inventory_has_the_configured_devices(setting: dict[str, object], ids: list[str]) -> None:
    inventory = Inventory.of(InferenceSettings.model_validate(setting))
    await inventory.start()
    assert [reading.id for reading in inventory.measured()] == ids
    assert [reading.id for reading in inventory.accelerators()] == ids[:-1]
    await inventory.close()
