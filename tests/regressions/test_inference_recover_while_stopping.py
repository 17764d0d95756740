"""Who asked for the trial of a device while the service stopped waited for a verdict that never came."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from inference.errors import ShuttingDown
from inference.protocol import DeviceState
from tests.rigs.authority_rig import FakeAccelerator, services


class _Slow(FakeAccelerator):
    """Its trials take for ever."""

    async def trial(self, device: str) -> None:
        await asyncio.Event().wait()


async def test_who_waits_for_a_verdict_is_told_that_the_service_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is whoever asks after that."""
    async with services(tmp_path, monkeypatch) as start:
        service = await start({"a": {}}, accelerator=_Slow())
        authority = service.authority
        asking = [asyncio.create_task(authority.recover("gpu-0")) for _ in range(2)]
        await authority.reached(lambda: authority.reading("gpu-0").state is DeviceState.PROBING)
        authority.quiesce()
        for task in asking:
            with pytest.raises(ShuttingDown):
                await task
        with pytest.raises(ShuttingDown):
            await authority.recover("gpu-0")
