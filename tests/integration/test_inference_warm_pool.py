"""The warm pool's bookkeeping over fake workers: whatever dies or hangs on the way, every byte is booked once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from inference.app import Service
from inference.authority.lifecycle import Action, Reason
from inference.authority.state import Timing
from inference.errors import InferenceError, InvalidRequestError
from inference.protocol import ModelState
from tests.rigs.authority_rig import MIB, FakeAccelerator, FakeEstimator, Start, services
from tests.rigs.live_authority import LiveModel as Model

S = ModelState


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def use(service: Service, name: str) -> Model:
    model = service.authority.resolve(name)
    lease = await service.authority.ask(model).wait(10)
    assert lease is not None
    lease.release(completed=True)
    return model


def on_host(service: Service) -> int:
    return service.authority.ledger.balance("cpu").ours_bytes


async def on_gpu(start: Start, models: dict[str, Any], behavior: dict[str, Any] | None = None, **env: Any) -> Service:
    service: Service = await start(models, behavior, accelerator=FakeAccelerator(), **env)
    return service


async def test_offloaded_model_on_the_cpu_keeps_its_process_and_booking(start: Start) -> None:
    """An idle model stays as a process without context, is booked for it, and is whole again when it is wanted."""
    service = await start({"a": {"idle_timeout": 0}}, {"a": {"saved": 10 * MIB}})
    model = await use(service, "a")
    assert model.running is not None
    pid = model.running.worker.pid
    await model.becomes(S.WARM)
    assert on_host(service) == (64 + 10) * MIB
    (kept,) = service.authority.offloaded()
    assert (kept["mechanism"], kept["original_device"], kept["bytes"]) == ("standby", "cpu", 74 * MIB)
    record = service.authority.state.evictions[-1]
    assert (record.action, record.reason, record.memory_freed_mb) == (Action.OFFLOAD, Reason.IDLE, 26)
    lease = await service.authority.ask(model).wait(10)
    assert lease is not None
    assert model.state is S.BUSY
    assert model.running.worker.pid == pid
    assert on_host(service) == 100 * MIB
    assert service.authority.state.restorations == 1
    assert service.authority.offloaded() == []
    assert model.loads == 1


async def test_offloaded_model_of_an_accelerator_is_kept_by_another_process(start: Start) -> None:
    """Nothing is booked on the device while it is warm; the process that comes back is the one that held the file."""
    service = await on_gpu(start, {"a": {}}, {"a": {"saved": MIB}})
    model = await use(service, "a")
    assert model.running is not None
    pid = model.running.worker.pid
    await service.authority.offload(model)
    assert model.state is S.WARM
    await service.authority.reached(lambda: service.authority.ledger.balance("gpu-0").ours_bytes == 0)
    keeper = model.running.worker.pid
    assert keeper != pid
    assert not Path(f"/proc/{pid}").exists()
    (kept,) = service.authority.offloaded()
    assert (kept["mechanism"], kept["original_device"]) == ("resident", "gpu-0")
    assert kept["bytes"] == on_host(service) == 64 * MIB + 4 + MIB
    await use(service, "a")
    assert model.state is S.READY
    assert model.running.worker.pid == keeper
    assert model.running.device.id == "gpu-0"
    assert on_host(service) == 0
    assert service.authority.ledger.balance("gpu-0").ours_bytes == 100 * MIB


@pytest.mark.parametrize(
    ("device", "step", "how"),
    [
        ("cpu", "offload", "die"),
        ("cpu", "restore", "hang"),
        ("gpu-0", "hold", "die"),
    ],
)
async def test_failure_during_an_offload_releases_all_bookings(start: Start, device: str, step: str, how: str) -> None:
    """A worker ends or hangs during an offload, while warm or when restored: its model is loaded from the file."""
    behavior = {"a": {step: how}, "x": {step: how}}
    models: dict[str, Any] = {"a": {}}
    timeouts = {"LOAD_TIMEOUT_SECONDS": "1", "parts": {"timing": Timing(save_seconds=0.5)}}
    if device == "cpu":
        service = await start(models, behavior, **timeouts)
    else:
        service = await on_gpu(start, models, behavior, **timeouts)
    model = await use(service, "a")
    await service.authority.offload(model)
    assert model.state in (S.WARM, S.FAILED, S.COLD)
    await service.authority.reached(lambda: device == "cpu" or not service.authority.ledger.balance(device).ours_bytes)
    await use(service, "a")
    assert model.state is S.READY
    booked = service.authority.ledger.owned_by("a")
    assert booked == {device: 100 * MIB}
    await service.authority.unload(model)
    await service.authority.emptied()


@pytest.mark.parametrize("device", ["cpu", "gpu-0"])
async def test_killed_warm_model_becomes_cold_without_bookings(start: Start, device: str) -> None:
    """kill -9 of the process that keeps it."""
    service = await start({"a": {}}) if device == "cpu" else await on_gpu(start, {"a": {}})
    model = await use(service, "a")
    await service.authority.offload(model)
    assert model.running is not None
    os.kill(model.running.worker.pid, signal.SIGKILL)
    await service.authority.emptied()
    assert service.authority.offloaded() == []
    await use(service, "a")
    assert model.loads == 2


@pytest.mark.parametrize("seed", [1])
async def test_random_operations_book_every_byte_once(start: Start, seed: int) -> None:
    """Used, offloaded, evicted, killed and unloaded in any order: books balance all the time and are empty in the end.

    So are the supervisor's list and this process's own descriptors: every worker is reaped, with all that it was given.
    """
    estimator = FakeEstimator()
    estimator.sizes = {"a": 400, "b": 500, "c": 600}
    models: dict[str, Any] = {"a": {}, "b": {"idle_timeout": 0}, "c": {}}
    behavior = {"a": {"saved": MIB}, "b": {"saved": 2 * MIB}}
    service: Service = await start(models, behavior, accelerator=FakeAccelerator(), estimator=estimator)
    authority, chance = service.authority, random.Random(seed)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(30):
        model = authority.resolve(chance.choice("abc"))
        match chance.choice(["use", "use", "use", "offload", "kill", "unload", "leave"]):
            case "use":
                ticket = authority.ask(model)
                with contextlib.suppress(InferenceError):  # its worker was killed a moment ago
                    if await ticket.wait(chance.choice([0, 10])) is not None and chance.random() < 0.5:
                        await asyncio.sleep(0)
                ticket.close()
            case "offload":
                with contextlib.suppress(InvalidRequestError):
                    await authority.offload(model)
            case "kill":
                if model.running is not None:
                    os.kill(model.running.worker.pid, signal.SIGKILL)
            case "unload":
                await authority.unload(model, now=True)
            case "leave":
                authority.leave(model, Reason.PRESSURE, chance.choice(list(Action)))
        for device in ("cpu", "gpu-0"):
            balance = authority.ledger.balance(device)
            assert balance.ours_bytes <= authority.ledger.accounts[device].budget_bytes
    for model in authority.models.values():
        assert not model.queue.waiters
    for model in authority.models.values():
        await authority.unload(model, now=True)
    await authority.emptied()
    await authority.reached(lambda: not authority.state.workers)
    assert authority.offloaded() == []
    await authority.reached(lambda: len(list(Path("/proc/self/fd").iterdir())) <= descriptors)
