"""The warm pool's bookkeeping with fake workers: if a worker ends or hangs, every byte is booked once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from inference.app import Service
from inference.authority.state import Timing
from inference.errors import InferenceError, InvalidRequestError
from inference.protocol import ModelState
from tests.rigs.authority_rig import MIB, FakeAccelerator, FakeEstimator, Start
from tests.rigs.live_authority import LiveModel as Model

S = ModelState


async def use(service: Service, name: str) -> Model:
    model = service.authority.resolve(name)
    lease = await service.authority.ask(model).wait(10)
    assert lease is not None
    lease.release(completed=True)
    return model


async def on_gpu(start: Start, models: dict[str, Any], behavior: dict[str, Any] | None = None, **env: Any) -> Service:
    service: Service = await start(models, behavior, accelerator=FakeAccelerator(), **env)
    return service


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
    timeouts = {"LOAD_TIMEOUT_SECONDS": "1", "parts": {"timing": Timing(store_seconds=0.5)}}
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


@pytest.mark.parametrize("seed", [1])
async def test_random_operations_book_every_byte_once(start: Start, seed: int) -> None:
    """Models are used, offloaded, killed and unloaded in any order: bookings never exceed the budgets.

    In the end no worker and no descriptor of a worker remains. Only stored sequences stay.
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
        match chance.choice(["use", "use", "use", "offload", "kill", "unload", "drain"]):
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
            case "drain":
                await authority.unload(model)
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
    arenas = authority.ledger.caches.keys()
    assert arenas <= {"a", "b"}
    await authority.reached(lambda: len(list(Path("/proc/self/fd").iterdir())) <= descriptors + len(arenas))
