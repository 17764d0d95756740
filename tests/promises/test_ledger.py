"""A reservation is made before a process starts and is released exactly once, however the load or the worker ends."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from inference.app import Service
from inference.errors import InferenceError
from inference.protocol import ModelState
from tests.rigs.authority_rig import Start
from tests.rigs.instant_workers import InstantSupervisor, InstantWorker
from tests.rigs.live_authority import LiveModel as Model

pytestmark = pytest.mark.timeout(60)
S = ModelState


async def _loaded(service: Service, model: Model) -> None:
    await service.authority.load(model)
    assert service.authority.ledger.holdings


async def _unloaded(service: Service, model: Model) -> None:
    await _loaded(service, model)
    await service.authority.unload(model)


async def _killed(service: Service, model: Model) -> None:
    await _loaded(service, model)
    assert model.running is not None
    os.kill(model.running.worker.pid, signal.SIGKILL)


async def _aborted(service: Service, model: Model) -> None:
    await _loaded(service, model)
    assert model.running is not None
    os.kill(model.running.worker.pid, signal.SIGABRT)


async def _fails_to_load(service: Service, model: Model) -> None:
    with pytest.raises(InferenceError):
        await service.authority.load(model)


async def _cancelled(service: Service, model: Model) -> None:
    loading = asyncio.create_task(service.authority.load(model))
    await model.becomes(S.LOADING)
    assert service.authority.ledger.holdings
    loading.cancel()
    await service.authority.unload(model, now=True)


ENDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "unload": (_unloaded, {}),
    "kill": (_killed, {}),
    "abort": (_aborted, {}),
    "load-refused": (_fails_to_load, {"fail": "oom_load"}),
    "load-aborts": (_fails_to_load, {"abort": "GGML_ASSERT(x) failed"}),
    "exit-before-hello": (_fails_to_load, {"exit": 3}),
    "cancelled": (_cancelled, {"load_seconds": 5}),
}


@pytest.mark.parametrize("way", ENDS)
async def test_memory_is_released_however_a_worker_ends(start: Start, way: str) -> None:
    """A crash releases the same as an unload."""
    end, behavior = ENDS[way]
    service = await start({"a": {}}, {"*" if "exit" in behavior else "a": behavior})
    model = service.authority.resolve("a")
    await end(service, model)
    await service.authority.emptied()
    assert service.authority.ledger.balance("cpu").ours_bytes == 0


class ObservedSupervisor(InstantSupervisor):
    """Notes what is booked when it starts a worker."""

    def __init__(self) -> None:
        super().__init__()
        self.booked_bytes = lambda: 0
        self.seen: list[int] = []

    def spawn(self, *arguments: Any, **more: Any) -> InstantWorker:
        self.seen.append(self.booked_bytes())
        return super().spawn(*arguments, **more)


async def test_memory_is_reserved_before_a_process_starts(start: Start) -> None:
    """When the process is spawned, the bytes of the placement are booked."""
    supervisor = ObservedSupervisor()
    service = await start({"a": {}}, parts={"supervisor": supervisor})
    supervisor.booked_bytes = lambda: service.authority.ledger.balance("cpu").ours_bytes
    await service.authority.load(service.authority.resolve("a"))
    assert supervisor.seen == [100 * 2**20]
