"""Listeners of /events get a snapshot first, then every change with a number."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from inference.protocol import DeviceState
from tests.rigs.authority_rig import FakeAccelerator, Start


async def next_event(listener: AsyncIterator[bytes], kind: str) -> dict[str, Any]:
    """The data of the next event of that kind."""
    async with asyncio.timeout(10):
        async for frame in listener:
            if frame.startswith(f"event: {kind}\n".encode()):
                return dict(json.loads(frame.split(b"data: ", 1)[1]))
    raise AssertionError(f"the stream ended before {kind}")


async def test_events_follow_a_load_from_the_queue_to_the_eviction(start: Start) -> None:
    service = await start({"a": {}}, {"a": {"load_seconds": 0.4}})
    authority, model = service.authority, service.authority.resolve("a")
    service.estimator.gate = asyncio.Event()
    listener = authority.bus.listen()
    first = await next_event(listener, "snapshot")
    assert [entry["id"] for entry in first["models"]] == ["a"]
    assert [entry["id"] for entry in first["devices"]] == ["cpu"]
    tickets = [authority.ask(model) for _ in range(2)]
    queued = await next_event(listener, "model")
    assert (queued["model"]["headgate"]["queued"], queued["model"]["headgate"]["state"]) == (2, "cold")
    tickets.pop().close()
    assert (await next_event(listener, "model"))["model"]["headgate"]["queued"] == 1
    service.estimator.gate.set()
    progress = [await next_event(listener, "load") for _ in range(3)]
    assert [event["progress"] for event in progress] == sorted(event["progress"] for event in progress)
    assert queued["number"] < progress[0]["number"] < progress[-1]["number"]
    lease = await tickets.pop().wait(10)
    assert lease is not None
    lease.release()
    leaving = asyncio.create_task(authority.unload(model))
    assert (await next_event(listener, "eviction"))["eviction"]["reason"] == "by hand"
    await leaving


async def test_events_follow_devices_that_fail_or_disappear(start: Start) -> None:
    gpu = FakeAccelerator()
    service = await start({"a": {}}, accelerator=gpu)
    authority = service.authority
    listener = authority.bus.listen()
    await next_event(listener, "snapshot")
    gpu.change(state=DeviceState.SUSPECT)
    event = await next_event(listener, "device")
    assert (event["device"]["id"], event["device"]["state"]) == ("gpu-0", "suspect")
    gpus, gpu.gpus = gpu.gpus, {}
    assert (await next_event(listener, "removed"))["device"] == "gpu-0"
    gpu.gpus = gpus
    gpu.change(state=DeviceState.HEALTHY)
    event = await next_event(listener, "device")
    assert (event["device"]["id"], event["device"]["state"]) == ("gpu-0", "probing"), "a returned device has an event"
