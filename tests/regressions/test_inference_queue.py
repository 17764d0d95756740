"""Requests that wait: removed models, suspended machines, timers in the past, shutdown."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import uvloop

from inference.authority.clock import Clock
from inference.authority.views import figures
from inference.errors import DeadlineExceeded, ModelNotFound, ShuttingDown
from inference.protocol import DeviceState, ModelState
from inference.settings import load
from tests.rigs.authority_rig import FakeAccelerator, Start, rewrite, services


def test_timers_in_the_past_fire_with_uvloop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with services(tmp_path, monkeypatch) as start:
            service = await start({"a": {}})
            authority, model = service.authority, service.authority.resolve("a")
            service.estimator.gate = asyncio.Event()  # type: ignore[attr-defined]
            rung = asyncio.Event()
            Clock().call_at(authority.now - 1.0, rung.set)
            await asyncio.wait_for(rung.wait(), 5)
            with pytest.raises(DeadlineExceeded):
                await asyncio.wait_for(authority.ask(model, seconds=0.0).wait(), 5)
            service.estimator.gate.set()  # type: ignore[attr-defined]
            await asyncio.wait_for(authority.load(model), 10)
            assert model.state is ModelState.READY

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())


async def test_request_for_a_removed_model_fails_at_once(start: Start, tmp_path: Path) -> None:
    service = await start({"a": {}, "b": {}})
    authority, model = service.authority, service.authority.resolve("a")
    await authority.load(model)
    rewrite(tmp_path, {"b": {}})
    authority.reload(load(tmp_path, {"INFERENCE_FORCE_CPU_MODE": "true"}, {}))
    for _ in ("while it leaves", "when it is gone"):
        with pytest.raises(ModelNotFound, match="configured models: b"):
            authority.ask(model)
        await authority.reached(lambda: model.running is None)


async def test_suspended_service_ends_no_wait_and_no_worker_when_it_continues(start: Start) -> None:
    service = await start({"a": {}, "b": {}}, WORKER_SILENCE_SECONDS="0.7")
    authority = service.authority
    await authority.load(authority.resolve("b"))
    loaded = authority.resolve("b").running
    service.estimator.gate = asyncio.Event()
    ticket = authority.ask(authority.resolve("a"), seconds=1.2)
    time.sleep(1.8)  # blocks the loop, as a suspended process does
    await asyncio.sleep(0)
    assert ticket.pending
    service.estimator.gate.set()
    assert await ticket.wait(10) is not None
    ticket.close()
    await authority.reached(lambda: loaded is not None and loaded.worker.beat is not None)
    assert authority.resolve("b").running == loaded
    assert authority.resolve("b").state is ModelState.READY


async def test_model_that_was_never_used_has_no_idle_time(start: Start) -> None:
    service = await start({"a": {}})
    authority, model = service.authority, service.authority.resolve("a")
    with authority.ask(model, seconds=30) as ticket:
        await model.becomes(ModelState.LOADING)
        assert authority.status(model).idle_seconds is None
        assert figures.model(authority.state, model.record, authority.now)["idle_seconds"] is None
        (await ticket.wait()).release(completed=True)
    idle = authority.status(model).idle_seconds
    assert idle is not None
    assert idle < 5


class _Slow(FakeAccelerator):
    """Its trials never end."""

    async def trial(self, device: str) -> None:
        await asyncio.Event().wait()


async def test_waiting_for_a_device_trial_ends_when_the_service_stops(start: Start) -> None:
    service = await start({"a": {}}, accelerator=_Slow())
    authority = service.authority
    waiting = [asyncio.create_task(authority.recover("gpu-0")) for _ in range(2)]
    await authority.reached(lambda: authority.reading("gpu-0").state is DeviceState.PROBING)
    authority.stop_accepting()
    for task in waiting:
        with pytest.raises(ShuttingDown):
            await task
    with pytest.raises(ShuttingDown):
        await authority.recover("gpu-0")
