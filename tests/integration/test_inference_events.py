"""What listeners of /events hear: all there is first, then every change with its number."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference.devices.device import Reading
from inference.protocol import DeviceState
from tests.rigs.authority_rig import FakeAccelerator, Start, services


class Ailing(FakeAccelerator):
    """A GPU whose state the test sets; None takes it away."""

    state: DeviceState | None = DeviceState.HEALTHY

    def readings(self) -> tuple[Reading, ...]:
        """None when it is gone."""
        return tuple(replace(reading, state=self.state) for reading in super().readings() if self.state is not None)


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def heard(listening: AsyncIterator[bytes], kind: str) -> dict[str, Any]:
    """The data of the next event of that kind."""
    async with asyncio.timeout(10):
        async for frame in listening:
            if frame.startswith(f"event: {kind}\n".encode()):
                return dict(json.loads(frame.split(b"data: ", 1)[1]))
    raise AssertionError(f"the stream ended before {kind}")


async def test_a_load_is_told_from_the_queue_to_the_last_percent_and_the_way_out_as_well(start: Start) -> None:
    service = await start({"a": {}}, {"a": {"load_seconds": 0.4}})
    authority, model = service.authority, service.authority.resolve("a")
    service.estimator.gate = asyncio.Event()
    listening = authority.bus.listen()
    first = await heard(listening, "snapshot")
    assert [entry["id"] for entry in first["models"]] == ["a"]
    assert [entry["id"] for entry in first["devices"]] == ["cpu"]
    tickets = [authority.ask(model) for _ in range(2)]
    queued = await heard(listening, "model")
    assert (queued["model"]["headgate"]["queued"], queued["model"]["headgate"]["state"]) == (2, "cold")
    tickets.pop().close()
    assert (await heard(listening, "model"))["model"]["headgate"]["queued"] == 1
    service.estimator.gate.set()
    progress = [await heard(listening, "load") for _ in range(3)]
    assert [event["progress"] for event in progress] == sorted(event["progress"] for event in progress)
    assert queued["number"] < progress[0]["number"] < progress[-1]["number"]
    lease = await tickets.pop().wait(10)
    assert lease is not None
    lease.release()
    leaving = asyncio.create_task(authority.unload(model))
    assert (await heard(listening, "eviction"))["eviction"]["reason"] == "by hand"
    await leaving


async def test_devices_that_fall_ill_or_go_are_told(start: Start) -> None:
    gpu = Ailing()
    service = await start({"a": {}}, accelerator=gpu)
    authority = service.authority
    listening = authority.bus.listen()
    await heard(listening, "snapshot")
    gpu.state = DeviceState.SUSPECT
    told = await heard(listening, "device")
    assert (told["device"]["id"], told["device"]["state"]) == ("gpu-0", "suspect")
    gpu.state = None
    assert (await heard(listening, "removed"))["device"] == "gpu-0"
    gpu.state = DeviceState.HEALTHY
    told = await heard(listening, "device")
    assert (told["device"]["id"], told["device"]["state"]) == ("gpu-0", "probing"), "a device that came back is news"
