"""Listeners of /events get a snapshot first, then every change with a number."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from inference.authority.views import event_bus
from inference.authority.views.event_bus import Bus, LogPublisher
from inference.protocol import DeviceState
from tests.rigs.asgi import ask
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
    gpu.gpus = {**gpu.gpus, "gpu-1": replace(gpus["gpu-0"], id="gpu-1")}
    gpu.change()
    while (event := await next_event(listener, "device"))["device"]["id"] == "gpu-0":
        pass
    assert event["device"]["id"] == "gpu-1", "a new device has an event"


async def test_figures_of_devices_add_up_while_a_model_is_loaded_and_used(start: Start) -> None:
    """Only listeners that request them get figures, and only changed ones."""
    service = await start(
        {"a": {"idle_timeout": 60}, "b": {}}, {"a": {"load_seconds": 0.3}}, accelerator=FakeAccelerator()
    )
    authority = service.authority
    listener = authority.bus.listen(figures=True)
    await next_event(listener, "snapshot")
    empty = await next_event(listener, "figures")
    assert [device["id"] for device in empty["devices"]] == ["gpu-0", "cpu"]
    assert empty["models"] == {}
    loading = asyncio.create_task(authority.load("a"))
    while not (figures := await next_event(listener, "figures"))["models"].get("a", {}).get("blocks"):
        adds_up(figures)
    await loading
    adds_up(figures)
    row = figures["devices"][0]["by_model"]["a"]
    assert row["resident"] > 0
    found = figures["models"]["a"]
    assert (found["progress"], found["in_flight"], found["queued"]) == (None, 0, 0)
    assert found["idle_deadline"] is not None
    lease = await authority.ask("a").wait(10)
    assert lease is not None
    used = (await next_event(listener, "figures"))["models"]["a"]
    assert (used["in_flight"], used["idle_deadline"]) == (1, None)


def adds_up(figures: dict[str, Any]) -> None:
    """What models have on a device is what its account has."""
    for device in figures["devices"]:
        rows = device["by_model"].values()
        assert all(sum(row[kind] for kind in ("weights", "kv", "compute", "other")) == row["resident"] for row in rows)
        for phase in ("resident", "reserved"):
            assert sum(row[phase] for row in rows) == device["accounts"][phase]


async def test_crashes_and_warnings_are_events(start: Start) -> None:
    service = await start({"broken": {}}, {"broken": {"abort": "GGML_ASSERT"}})
    bus = service.authority.bus
    lines = LogPublisher(bus, asyncio.get_running_loop())
    logging.getLogger().addHandler(lines)
    try:
        listener = bus.listen()
        await next_event(listener, "snapshot")
        await ask(service.app, "POST", "/models/broken/load")
        crash = (await next_event(listener, "crash"))["crash"]
        assert (crash["id"], crash["cause"]) == ("broken", "assert")
        line = (await next_event(listener, "log"))["line"]
        assert line["level"] in ("warning", "error")
        assert line["logger"].startswith("inference")
    finally:
        logging.getLogger().removeHandler(lines)


async def test_silent_stream_has_beats_between_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_bus, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(event_bus, "FIGURES_SECONDS", 0.02)
    bus = Bus()
    listener = bus.listen(figures=True)
    kinds = [(await anext(listener)).split(b"\n")[0] for _ in range(4)]
    assert kinds == [b"event: snapshot", b"event: figures", b"event: beat", b"event: beat"]
