"""Devices that fail for days or are probed while a model is suspended."""

from __future__ import annotations

import sys

import pytest

from inference.authority.lifecycle import Reason
from inference.devices.checkpoint_support import SuspensionFailure
from inference.devices.device import Reading
from inference.devices.reopen_policy import MAX_SECONDS, Reopening
from inference.protocol import DeviceState, ModelState
from tests.rigs.authority_rig import FakeAccelerator, Start


class Suspender:
    """Every operation succeeds."""

    label = "the fake"

    async def test(self, device: Reading) -> SuspensionFailure | None:
        return None

    async def run(self, operation: str, device: str, pid: int, seconds: float) -> SuspensionFailure | None:
        return None


@pytest.mark.skipif(sys.platform != "linux", reason="checkpoints are Linux's")
async def test_eviction_record_of_a_suspended_model_names_the_device_and_its_state(start: Start) -> None:
    accelerator = FakeAccelerator(2, "sim")
    service = await start({"a": {}}, accelerator=accelerator, suspenders={"sim": Suspender()})
    model = service.authority.resolve("a")
    for _ in range(2):
        lease = await service.authority.ask(model).wait(20)
        assert lease is not None
        lease.release(completed=True)
        if accelerator.gpus["gpu-0"].state is DeviceState.HEALTHY:
            await service.authority.offload(model)
            assert model.state is ModelState.WARM
            (kept,) = service.authority.offloaded()
            assert (kept["mechanism"], kept["original_device"]) == ("checkpoint", "gpu-0")
            accelerator.change(state=DeviceState.PROBING)
    await service.authority.reached(lambda: len(service.authority.state.evictions) == 2)
    explained = {record.reason: record.explanation for record in service.authority.state.evictions}
    assert explained == {Reason.BY_HAND: (), Reason.DEVICE: ("gpu-0 is probing",)}
    assert model.running is not None
    assert model.running.device.id == "gpu-1"


def test_restart_delay_of_a_failing_device_stays_limited() -> None:
    state = Reopening()
    for _ in range(20_000):
        state = state.failed(state.due_at)
    assert state.failed(0.0).due_at == MAX_SECONDS
