"""One question to the simulator that was given up (a caller's deadline) made all its devices lost until the restart."""

from __future__ import annotations

import asyncio
import logging

import pytest

from inference.devices.simgpu.probe import SimProbe
from inference.protocol import DeviceState


async def test_the_next_question_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    probe = SimProbe([2**20])
    await probe.start()
    try:
        asking = asyncio.create_task(probe.tell("status"))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()
        await probe.refresh()
        assert [reading.state for reading in probe.readings()] == [DeviceState.HEALTHY]
        with caplog.at_level(logging.ERROR):
            await asyncio.gather(probe.refresh(), probe.close())
        assert not caplog.records, "a question that the end of the service met is no lost device"
    finally:
        await probe.close()
