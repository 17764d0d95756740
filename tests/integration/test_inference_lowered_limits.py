"""A reload that lowers limits: who is loaded beyond them leaves, idle at once and busy when it is done; nobody else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from inference.app import Service
from inference.authority.leases import Lease
from inference.authority.lifecycle.departures import Action, Reason
from inference.errors import MemoryLimitExceededError
from inference.protocol import ModelState
from tests.rigs.authority_rig import MIB, FakeEstimator, SharedDevice, Start, reload, services
from tests.rigs.live_authority import LiveModel as Model

S = ModelState


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def taken(service: Service, name: str) -> Lease:
    lease = await service.authority.ask(service.authority.resolve(name)).wait(10)
    assert lease is not None
    return lease


def gib(mib: float) -> str:
    return str(mib * MIB / 2**30)


async def test_the_idle_leave_at_once_and_the_busy_one_when_it_is_done(start: Start, tmp_path: Path) -> None:
    """Three of 100 MiB, then a limit of 50: the running answer is finished, and who asks again hears numbers."""
    models: dict[str, dict[str, Any]] = {"a": {"pinned": True}, "b": {}, "c": {}}
    service = await start(models, ENABLE_CPU_OFFLOAD="false")
    a, b, c = (service.authority.resolve(name) for name in models)
    for name in "ab":
        (await taken(service, name)).release(completed=True)
    lease = await taken(service, "c")
    environ = {"FORCE_CPU_MODE": "true", "ENABLE_CPU_OFFLOAD": "false"}
    reload(service, tmp_path, models, **environ, MEMORY_LIMIT_GB=gib(250))
    await b.becomes(S.COLD)
    assert (a.state, c.state) == (S.READY, S.BUSY)
    record = service.authority.state.evictions[-1]
    assert (record.reason, record.action) == (Reason.LOWERED, Action.UNLOAD)
    assert record.explanation == ("loaded models hold 50.0 MiB more than INFERENCE_MEMORY_LIMIT_GB from now on",)
    reload(service, tmp_path, models, **environ, MEMORY_LIMIT_GB=gib(250), MAX_MODELS="5")
    assert (a.state, c.state) == (S.READY, S.BUSY)
    reload(service, tmp_path, models, **environ, MEMORY_LIMIT_GB=gib(50))
    assert c.state is S.DRAINING
    assert c.in_flight == 1
    ticket = service.authority.ask(c)
    lease.release(completed=True)
    with pytest.raises(MemoryLimitExceededError):
        await ticket.wait(10)
    await service.authority.reached(lambda: (a.state, c.state) == (S.COLD, S.COLD))
    assert not service.authority.ledger.holdings


@pytest.mark.parametrize(
    "lower", [{"GPU_MEMORY_MAX_PERCENT": "0.25"}, {"GPU_MEMORY_LIMIT_MB": "250"}, {"MAX_MODELS_PER_DEVICE": "1"}]
)
async def test_every_limit_that_is_lowered_holds_afterwards(
    start: Start, tmp_path: Path, lower: dict[str, str]
) -> None:
    """Of two idle ones on a GPU of 1,000 MiB the cheaper one leaves, into host memory, where it is no loaded model."""
    models: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
    estimator = FakeEstimator()
    estimator.sizes = {"a": 150, "b": 200}
    device = SharedDevice()
    service = await start(models, {"b": {"load_seconds": 1.0}}, accelerator=device, estimator=estimator)
    device.service = service
    for name in models:
        (await taken(service, name)).release(completed=True)
    reload(service, tmp_path, models, **lower)
    a, b = (service.authority.resolve(name) for name in models)
    await a.becomes(S.WARM)
    assert b.state is S.READY
    assert service.authority.ledger.excess("gpu-0") == 0
    assert service.authority.state.evictions[-1].action is Action.OFFLOAD


async def test_who_leaves_for_host_memory_that_was_lowered_is_not_kept_there(start: Start, tmp_path: Path) -> None:
    """Neither a loaded one, nor one that was on its way into host memory already."""
    models: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
    service = await start(models, {"a": {"buffers": 0}})
    authority = service.authority
    a, b = (authority.resolve(name) for name in models)
    for name in models:
        (await taken(service, name)).release(completed=True)
    authority.leave(a, Reason.PRESSURE, Action.OFFLOAD)
    assert a.state is S.OFFLOADING
    total = authority.readings()[-1].total_bytes
    reload(service, tmp_path, models, FORCE_CPU_MODE="true", CPU_MEMORY_MAX_PERCENT=str(50 * MIB / total))
    await authority.reached(lambda: (a.state, b.state) == (S.COLD, S.COLD))
    assert authority.ledger.excess("cpu") == 0


async def test_a_warm_model_counts_for_the_limit_once_it_is_loaded_again(start: Start) -> None:
    """Warm beside one that fills the limit; when it is wanted the other one has to leave for all of it."""
    service = await start({"a": {}, "b": {}}, MEMORY_LIMIT_GB=gib(150))
    authority = service.authority
    a, b = authority.resolve("a"), authority.resolve("b")

    async def use(model: Model) -> None:
        (await taken(service, model.id)).release(completed=True)

    await use(a)
    for leaver, other in ((a, b), (b, a), (a, b)):
        await use(other)
        assert (leaver.state, other.state) == (S.WARM, S.READY)
        assert authority.ledger.loaded_bytes == 100 * MIB
        assert authority.ledger.balance("cpu").ours_bytes == 164 * MIB
    assert (a.loads, b.loads, authority.state.restorations) == (1, 1, 2)
