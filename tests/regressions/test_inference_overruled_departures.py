"""A model that drained for another one stayed when that one gave up, although it had been told to go for good."""

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
    """`a` finishes an answer, because somebody waits for `b` and both do not fit."""
    service: Service = await start({"a": {}, "b": {}}, MEMORY_LIMIT_GB="0.15")
    authority, model = service.authority, service.authority.resolve("a")
    lease = await authority.ask(model).wait(10)
    assert lease is not None
    wish = authority.ask(authority.resolve("b"))
    await model.becomes(S.DRAINING)
    return service, model, lease, wish


async def test_a_model_unloaded_by_hand_while_it_drains_is_unloaded(start: Start) -> None:
    """The answer under way is finished, and the record says whose wish it was."""
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
async def test_a_reload_counts_while_a_model_drains(start: Start, tmp_path: Path, change: str) -> None:
    """What was loaded with settings that are gone neither stays nor is kept warm."""
    service, model, lease, wish = await draining(start)
    rewrite(tmp_path, {"b": {}} if change == "removed" else {"a": {"context_length": 512}, "b": {}})
    service.authority.reload(settings.load(tmp_path, ENVIRON, {}))
    wish.close()
    lease.release(completed=True)
    await service.authority.reached(lambda: model.state is S.COLD and empty(service))
    assert ("a" in service.authority.models) == (change == "changed")


async def waiting_for_the_pool(start: Start, reason: Reason = Reason.BY_HAND) -> tuple[Service, Model]:
    """`a` has no answer under way and leaves, once `w`, which is warm and worth less, has made room in the pool."""
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


async def test_who_waits_for_the_pool_goes_at_once_when_told_to_go_for_good(start: Start) -> None:
    """Nothing is under way that it could finish."""
    service, model = await waiting_for_the_pool(start)
    assert (model.state, service.authority.resolve("w").state) == (S.DRAINING, S.UNLOADING)
    service.authority.leave(model, Reason.CHANGED)
    assert model.state is S.UNLOADING
    await service.authority.reached(lambda: model.state is S.COLD and empty(service))


async def test_who_stays_without_an_answer_under_way_is_idle(start: Start) -> None:
    """It was called busy for ever; and its next answer was cut when the room it had waited for was there."""
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


def test_which_reason_weighs_more() -> None:
    """For good beats for others' sake; what is unloaded for good is not kept after all."""
    by_hand = Departure(Reason.BY_HAND)
    kept_by_hand = Departure(Reason.BY_HAND, Action.OFFLOAD)
    wanted = Departure(Reason.MEMORY_WANTED, Action.OFFLOAD)
    assert by_hand.overrules(wanted)
    assert kept_by_hand.overrules(wanted)
    assert by_hand.overrules(kept_by_hand)
    assert not kept_by_hand.overrules(by_hand)
    assert not wanted.overrules(by_hand)
    assert not Departure(Reason.PRESSURE).overrules(wanted)
