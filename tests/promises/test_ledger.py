"""A reservation is made before a process starts and is released exactly once, however the load or the worker ends."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from inference.app import Service
from inference.authority.placement.ledger import Ledger
from inference.errors import InferenceError
from inference.protocol import ModelState
from inference.workers.worker_supervisor import Supervisor
from tests.rigs.authority_rig import Start
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
async def test_memory_is_released_exactly_once_however_a_worker_ends(
    start: Start, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash gives back the same as an unload."""
    released: list[str] = []
    original = Ledger.release

    def counting(ledger: Ledger, holding: str) -> Ledger:
        released.append(holding)
        return original(ledger, holding)

    monkeypatch.setattr(Ledger, "release", counting)
    end, behavior = ENDS[way]
    service = await start({"a": {}}, {"*" if "exit" in behavior else "a": behavior})
    model = service.authority.resolve("a")
    await end(service, model)
    await service.authority.emptied()
    assert service.authority.ledger.balance("cpu").ours_bytes == 0
    assert len(released) == len(set(released)) == 1


async def test_memory_is_reserved_before_a_process_starts(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the moment of the spawn the bytes of the placement are in the books."""
    spawn, reserved = Supervisor.spawn, []

    def seen(*arguments: Any, **more: Any) -> Any:
        reserved.append(sum(sum(item.bytes.values()) for item in service.authority.ledger.holdings.values()))
        return spawn(*arguments, **more)

    monkeypatch.setattr(Supervisor, "spawn", seen)
    service = await start({"a": {}})
    await service.authority.load(service.authority.resolve("a"))
    assert reserved == [100 * 2**20]
