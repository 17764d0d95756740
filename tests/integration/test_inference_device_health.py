"""Models and their requests when a device is lost, becomes unhealthy or suspect, and returns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference.app import Service
from inference.authority.handlers.operating.startup import TICK_SECONDS
from inference.authority.lifecycle import Reason
from inference.devices.device import Reading
from inference.devices.signs import Sign
from inference.errors import DeviceLost, InvalidRequestError, MemoryLimitExceededError
from inference.protocol import DeviceState, ModelState
from inference.workers.helper_client import HelperError
from tests.rigs.asgi import ask
from tests.rigs.authority_rig import MIB, FakeAccelerator, Start, services
from tests.rigs.instant_workers import InstantSupervisor


class UnhealthyDevices(FakeAccelerator):
    """GPUs of 1,000 MiB whose signs and trials the test decides; `trying` holds trials up until it is set."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.signs = {f"gpu-{number}": (Sign.HEALTHY, "") for number in range(count)}
        self.failures: dict[str, str] = {}
        self.trials: list[str] = []
        self.renewals = 0
        self.trying = asyncio.Event()
        self.trying.set()

    def readings(self) -> tuple[Reading, ...]:
        total = 1000 * MIB
        return tuple(
            Reading(name, "cuda", "fake", total, total, 0, note=note, sign=sign)
            for name, (sign, note) in self.signs.items()
        )

    def listen(self, notice: Callable[[], None]) -> None:
        return None

    async def renew(self) -> None:
        self.renewals += 1

    async def trial(self, device: str) -> None:
        self.trials.append(device)
        await self.trying.wait()
        if device in self.failures:
            raise HelperError(self.failures[device])


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Starts services whose workers are no processes; `load_seconds` is model id -> time."""
    async with services(tmp_path, monkeypatch) as make:

        async def begin(models: dict[str, Any], gpus: UnhealthyDevices, load_seconds: dict[str, float] | None = None,
                        **environ: str) -> Service:  # fmt: skip
            parts = {"supervisor": InstantSupervisor(load_seconds)}
            service: Service = await make(models, accelerator=gpus, parts=parts, **environ)
            return service

        yield begin


def state_of(service: Service, device: str = "gpu-0") -> DeviceState:
    reading = service.authority.reading(device)
    assert reading is not None
    return reading.state


async def loses(
    service: Service, gpus: UnhealthyDevices, device: str = "gpu-0", note: str = "it fell off the bus"
) -> None:
    """The device is read as lost, at once."""
    gpus.signs[device] = (Sign.FAILED, note)
    await service.clock.advance(TICK_SECONDS)


async def test_models_of_a_lost_device_become_cold_at_once_without_affecting_others(start: Start) -> None:
    """A waiting request fails with the device's name; no bytes are booked before any process has ended."""
    gpus = UnhealthyDevices()
    models = {"a": {"gpu_index": 0}, "b": {"gpu_index": 0}, "c": {"gpu_index": 1}}
    service = await start(models, gpus, {"b": 30.0})
    authority = service.authority
    a, b, c = (authority.resolve(name) for name in models)
    leases = [await authority.ask(model).wait(10) for model in (a, c)]
    loading = authority.ask(b)
    await b.becomes(ModelState.LOADING)
    await loses(service, gpus)
    assert (a.state, b.state, c.state) == (ModelState.COLD, ModelState.COLD, ModelState.BUSY)
    assert authority.ledger.balance("gpu-0").ours_bytes == 0
    with pytest.raises(DeviceLost, match=r"gpu-0 is lost \(it fell off the bus\)") as caught:
        await loading.wait(10)
    assert 1 <= (caught.value.retry_after or 0) <= 2
    assert caught.value.details == {"devices": ["gpu-0"]}
    for lease in leases:
        assert lease is not None
        lease.release()
    await authority.unload(c)
    await authority.emptied()
    assert authority.crashes.of("a")[0]["cause"] == "device_lost"
    assert authority.metrics.total(authority.metrics.exits, cause=["device_lost"]) == 2


async def test_model_in_use_is_loaded_elsewhere_at_once_or_when_the_device_returns(start: Start) -> None:
    gpus = UnhealthyDevices()
    service = await start({"free": {}, "bound": {"gpu_index": 0}, "idle": {"gpu_index": 0}}, gpus,
                          EVICTION_IDLE_THRESHOLD_SECONDS="5")  # fmt: skip
    authority = service.authority
    free, bound, idle = (authority.resolve(name) for name in ("free", "bound", "idle"))
    await authority.load(idle)
    await service.clock.advance(10)
    await authority.move(free, "gpu-0")
    await authority.load(bound)
    await loses(service, gpus)
    await free.becomes(ModelState.READY)
    assert authority.status(free).devices == ("gpu-1",)
    status = authority.status(bound)
    assert (status.fits, status.reason) == (
        False, "no device is available: every accelerator is excluded or lost; gpu-0 is lost (it fell off the bus)"
    )  # fmt: skip
    assert 1 <= (status.retry_after_seconds or 0) <= 10
    gpus.signs["gpu-0"] = (Sign.HEALTHY, "")
    await bound.becomes(ModelState.READY)
    assert state_of(service) is DeviceState.HEALTHY
    assert gpus.trials == ["gpu-0"]
    assert (free.loads, bound.loads, idle.loads) == (2, 2, 1)
    assert authority.metrics.total(authority.metrics.recoveries, kind=["device"]) == 1


async def test_refusal_names_the_lost_device_and_its_next_trial(start: Start) -> None:
    gpus = UnhealthyDevices()
    service = await start({"a": {}}, gpus)
    authority = service.authority
    service.estimator.sizes = {"a": 5000}  # type: ignore[attr-defined]
    await loses(service, gpus)
    with pytest.raises(MemoryLimitExceededError, match=r"; gpu-0 is lost \(it fell off the bus\)$") as caught:
        await authority.load(authority.resolve("a"))
    assert 1 <= (caught.value.retry_after or 0) <= 10


async def test_worker_that_loses_its_device_does_not_affect_other_models(start: Start) -> None:
    """The device has a trial, other models continue, and new requests wait for its result."""
    gpus = UnhealthyDevices(1)
    gpus.trying.clear()
    service = await start({"a": {}, "b": {}}, gpus, {"a": 30.0})
    authority = service.authority
    a, b = authority.resolve("a"), authority.resolve("b")
    await authority.load(b)
    loading = authority.ask(a)
    await a.becomes(ModelState.LOADING)
    assert a.running is not None
    a.running.worker.lose("CUDA error: unspecified launch failure")
    running = b.running
    with pytest.raises(DeviceLost, match="the model 'a' lost gpu-0: it could not be loaded"):
        await loading.wait(10)
    assert state_of(service) is DeviceState.PROBING
    assert b.running == running
    await authority.unload(b, now=True)
    asking = asyncio.create_task(authority.load(b))
    await asyncio.sleep(0)
    assert b.queue.waiters
    gpus.trying.set()
    await asyncio.wait_for(asking, 10)
    assert state_of(service) is DeviceState.HEALTHY


async def test_unhealthy_device_is_drained(start: Start) -> None:
    gpus = UnhealthyDevices()
    service = await start({"a": {"gpu_index": 0}}, gpus)
    authority, model = service.authority, service.authority.resolve("a")
    lease = await authority.ask(model).wait(10)
    assert lease is not None
    gpus.signs["gpu-0"] = (Sign.DEGRADED, "Xid 63")
    await service.clock.advance(TICK_SECONDS)
    assert (state_of(service), model.state) == (DeviceState.DRAINING, ModelState.DRAINING)
    lease.release(completed=True)
    await authority.reached(lambda: state_of(service) is DeviceState.QUARANTINED)
    assert [record.reason for record in authority.state.evictions] == [Reason.DEVICE]
    with pytest.raises(DeviceLost, match=r"gpu-0 is quarantined \(Xid 63\)"):
        await authority.load(model)
    gpus.signs["gpu-0"] = (Sign.HEALTHY, "")
    await model.becomes(ModelState.READY)


async def test_operator_gets_the_result_of_a_trial(start: Start) -> None:
    gpus = UnhealthyDevices(1)
    service = await start({"a": {}}, gpus)
    authority = service.authority
    gpus.failures["gpu-0"] = "it computes 3 of 8192 numbers wrong"
    found = await authority.recover("gpu-0")
    assert (found.state, found.note) == (DeviceState.LOST, "it computes 3 of 8192 numbers wrong")
    gpus.failures.clear()
    assert (await authority.recover("gpu-0")).state is DeviceState.HEALTHY
    assert gpus.renewals == 2
    answer = await ask(service.app, "POST", "/devices/gpu-0/recover")
    assert (answer.status, answer.body["device"]["state"]) == (200, "healthy")
    for name in ("cpu", "gpu-7"):
        with pytest.raises(InvalidRequestError, match=f"unknown accelerator '{name}'; accelerators: gpu-0"):
            await authority.recover(name)


async def test_device_that_new_processes_cannot_reach_requires_a_restart_of_the_service(start: Start) -> None:
    gpus = UnhealthyDevices(1)
    service = await start({"a": {}}, gpus)
    gpus.failures["gpu-0"] = "no CUDA-capable device is detected"
    gpus.signs["gpu-0"] = (Sign.UNREACHABLE, "Unknown Error")
    await service.authority.reached(lambda: service.authority.state.restart_reason is not None)
    reason = "new processes cannot reach gpu-0 (no CUDA-capable device is detected)"
    assert service.authority.state.restart_reason == reason


async def test_device_that_is_no_longer_listed_is_lost_until_it_returns(start: Start) -> None:
    gpus = UnhealthyDevices()
    service = await start({"a": {"gpu_index": 1}}, gpus)
    model = service.authority.resolve("a")
    await service.authority.load(model)
    gone = gpus.signs.pop("gpu-1")
    await service.clock.advance(TICK_SECONDS)
    assert model.state is ModelState.COLD
    gpus.signs["gpu-1"] = gone
    await model.becomes(ModelState.READY)


async def test_raw_reading_is_kept_beside_the_shown_one(start: Start) -> None:
    gpus = UnhealthyDevices(1)
    service = await start({"a": {}}, gpus)
    await loses(service, gpus)
    (shown, _host), (measured, _) = service.authority.readings(), service.authority.inventory.measured()
    assert (shown.state, measured.state) == (DeviceState.LOST, DeviceState.HEALTHY)
    assert (shown.used_bytes, shown.free_bytes, measured.free_bytes) == (0, 0, 1000 * MIB)
    figures = {"used_bytes": measured.used_bytes, "free_bytes": measured.free_bytes}
    assert replace(shown, state=measured.state, verdict_seconds=None, **figures) == measured
