"""A suspended model whose device could not be used just then was dropped as if its configuration had changed."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from inference.authority.lifecycle.departures import Reason
from inference.devices.checkpoint.checkpoint_support import Trouble
from inference.devices.device import Reading
from inference.protocol import DeviceState, ModelState
from tests.rigs.authority_rig import FakeAccelerator, Start, services

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="checkpoints are Linux's")


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


class Simulated(FakeAccelerator):
    """A simulated GPU in whatever state, and another."""

    state = DeviceState.HEALTHY

    def readings(self) -> tuple[Reading, ...]:
        (reading,) = super().readings()
        first = replace(reading, kind="sim", state=self.state)
        return first, replace(reading, id="gpu-1", kind="sim")


class Carrier:
    """All goes well."""

    who = "the fake"

    async def test(self, device: Reading) -> Trouble | None:
        return None

    async def carry(self, operation: str, device: str, pid: int, seconds: float) -> Trouble | None:
        return None


async def test_the_record_names_the_device_and_its_state(start: Start) -> None:
    accelerator = Simulated()
    service = await start({"a": {}}, accelerator=accelerator, carriers={"sim": Carrier()})
    model = service.authority.resolve("a")
    for _ in range(2):
        lease = await service.authority.ask(model).wait(20)
        assert lease is not None
        lease.release(completed=True)
        if accelerator.state is DeviceState.HEALTHY:
            await service.authority.offload(model)
            assert model.state is ModelState.WARM
            (kept,) = service.authority.offloaded()
            assert (kept["mechanism"], kept["original_device"]) == ("checkpoint", "gpu-0")
            accelerator.state = DeviceState.PROBING
    await service.authority.reached(lambda: len(service.authority.state.evictions) == 2)
    told = {record.reason: record.explanation for record in service.authority.state.evictions}
    assert told == {Reason.BY_HAND: (), Reason.DEVICE: ("gpu-0 is probing",)}, "in the order in which memory is back"
    assert model.running is not None
    assert model.running.device.id == "gpu-1"
