"""A model whose only accelerator was lost was refused as if memory were short, in words without a number."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from inference.devices.device import Reading
from inference.errors import DeviceLost
from inference.protocol import DeviceState
from tests.integration.test_inference_moving import TwoAccelerators
from tests.rigs.authority_rig import Start, services


class LosesTheSecond(TwoAccelerators):
    """Two GPUs, of which the second can be lost."""

    lost = False

    def readings(self) -> tuple[Reading, ...]:
        """Both."""
        first, second = super().readings()
        return first, replace(second, state=DeviceState.LOST) if self.lost else second


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def test_it_is_the_device_that_is_lost(start: Start) -> None:
    devices = LosesTheSecond()
    service = await start({"bound": {"gpu_index": 1}, "free": {}}, accelerator=devices)
    devices.lost = True
    with pytest.raises(DeviceLost, match="gpu-1 is lost"):
        await service.authority.load(service.authority.resolve("bound"))
    await service.authority.load(service.authority.resolve("free"))
