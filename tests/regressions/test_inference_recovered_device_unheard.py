"""A device that was lost when NVML's child began was never listened to again: its later Xid events went unheard."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from inference.core.signs import Sign
from inference.devices.nvml import NvmlReader
from tests.rigs.nvml_stub import NvidiaGpu, NvmlStub

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the NVML stub is a Linux library")

LOST, FINE = "GPU-11111111-1111-1111-1111-111111111111", "GPU-22222222-2222-2222-2222-222222222222"


@pytest.mark.parametrize("also_lost", [False, True], ids=["one of two", "all"])
async def test_a_device_that_is_back_is_heard_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, also_lost: bool
) -> None:
    stub = NvmlStub(tmp_path, [NvidiaGpu(LOST, "00000000:01:00.0"), NvidiaGpu(FINE, "00000000:41:00.0")])
    for name, value in stub.env.items():
        monkeypatch.setenv(name, value)
    noticed = asyncio.Event()
    reader = NvmlReader()
    reader.listen(noticed.set)
    try:
        await reader.read()
        for uuid in (LOST, FINE) if also_lost else (LOST,):
            stub.errors.append(("all", 15, uuid))
        stub.write()
        await reader.renew()
        await reader.read()  # a fresh child, which finds it lost
        stub.errors.clear()
        stub.write()
        await reader.read()
        stub.xids.append((LOST, 79))
        stub.write()
        await asyncio.wait_for(noticed.wait(), 20)
        assert (await reader.read())["0:1:0.0"].sign is Sign.DEAD
    finally:
        await reader.close()
