"""A model that drains for one reason and is then asked to leave for another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference import settings
from inference.app import Service
from inference.authority.leases import Lease, Ticket
from inference.authority.lifecycle.departures import Action, Departure, Reason
from inference.devices.host import CpuProbe
from inference.protocol import ModelState
from tests.rigs.authority_rig import MIB, FakeAccelerator, Start, empty, rewrite, services
from tests.rigs.live_authority import LiveModel as Model

S = ModelState
ENVIRON = {"INFERENCE_FORCE_CPU_MODE": "true", "INFERENCE_MEMORY_LIMIT_GB": "0.15"}


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def draining(start: Start) -> tuple[Service, Model, Lease, Ticket]:
    """`a` finishes an answer and drains for `b`, because both do not fit."""
    service: Service = await start({"a": {}, "b": {}}, MEMORY_LIMIT_GB="0.15")
    authority, model = service.authority, service.authority.resolve("a")
    lease = await authority.ask(model).wait(10)
    assert lease is not None
    wish = authority.ask(authority.resolve("b"))
    await model.becomes(S.DRAINING)
    return service, model, lease, wish


async def test_unload_by_command_applies_to_a_model_that_drains(start: Start) -> None:
    """The running answer is finished, and the record has the reason of the command."""
    service, model, lease, wish = await draining(start)
    unloading = asyncio.create_task(service.authority.unload(model))
    await asyncio.sleep(0)
    wish.close()
    assert model.state is S.DRAINING
    lease.release(completed=True)
    await asyncio.wait_for(unloading, 10)
    assert model.state is S.COLD
    assert service.authority.state.evictions[-1].reason is Reason.BY_HAND


@pytest.mark.parametrize("change", ["changed", "removed"])
async def test_reload_applies_to_a_model_that_drains(start: Start, tmp_path: Path, change: str) -> None:
    """A model with replaced settings neither stays nor is kept warm."""
    service, model, lease, wish = await draining(start)
    rewrite(tmp_path, {"b": {}} if change == "removed" else {"a": {"context_length": 512}, "b": {}})
    service.authority.reload(settings.load(tmp_path, ENVIRON, {}))
    wish.close()
    lease.release(completed=True)
    await service.authority.reached(lambda: model.state is S.COLD and empty(service))
    assert ("a" in service.authority.models) == (change == "changed")


async def waiting_for_the_pool(start: Start, reason: Reason = Reason.BY_HAND) -> tuple[Service, Model]:
    """`a` has no running answer and leaves once the warm model `w`, which has a lower value, has left the pool."""
    share = str(100 * MIB / CpuProbe().readings()[0].total_bytes)
    service: Service = await start(
        {"w": {}, "a": {}}, {"a": {"load_seconds": 0.5}}, accelerator=FakeAccelerator(), CPU_MEMORY_MAX_PERCENT=share
    )
    authority, model, other = service.authority, service.authority.resolve("a"), service.authority.resolve("w")
    await authority.load(other)
    await authority.offload(other)
    await authority.reached(lambda: not authority.ledger.balance("gpu-0").ours_bytes)
    await authority.load(model)
    authority.leave(model, reason, Action.OFFLOAD)
    return service, model


async def test_model_that_waits_for_the_pool_is_unloaded_at_once_when_its_settings_change(start: Start) -> None:
    service, model = await waiting_for_the_pool(start)
    assert (model.state, service.authority.resolve("w").state) == (S.DRAINING, S.UNLOADING)
    service.authority.leave(model, Reason.CHANGED)
    assert model.state is S.UNLOADING
    await service.authority.reached(lambda: model.state is S.COLD and empty(service))


async def test_model_that_waits_for_the_pool_accepts_requests_and_finishes_them(start: Start) -> None:
    service, model = await waiting_for_the_pool(start, Reason.MEMORY_WANTED)
    authority = service.authority
    assert (model.state, authority.resolve("w").state) == (S.READY, S.UNLOADING)
    lease = await authority.ask(model).wait(1)
    assert lease is not None
    authority.leave(model, Reason.BY_HAND, Action.OFFLOAD)
    await authority.resolve("w").becomes(S.COLD)
    for _ in range(10):
        await asyncio.sleep(0)
    assert model.state is S.DRAINING
    lease.release(completed=True)
    await model.becomes(S.WARM)


def test_commands_overrule_other_reasons_and_unloading_overrules_offloading() -> None:
    by_hand = Departure(Reason.BY_HAND)
    kept_by_hand = Departure(Reason.BY_HAND, Action.OFFLOAD)
    wanted = Departure(Reason.MEMORY_WANTED, Action.OFFLOAD)
    assert by_hand.overrules(wanted)
    assert kept_by_hand.overrules(wanted)
    assert by_hand.overrules(kept_by_hand)
    assert not kept_by_hand.overrules(by_hand)
    assert not wanted.overrules(by_hand)
    assert not Departure(Reason.PRESSURE).overrules(wanted)
