"""The authority with fake worker processes: whatever happens in whatever order, memory and places come back."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.errors import (
    DeadlineExceeded,
    InferenceError,
    MemoryLimitExceededError,
    ModelFailed,
    ModelLoading,
    ShuttingDown,
)
from inference.protocol import ModelState, Priority
from tests.rigs.authority_rig import MIB, Start, empty, services


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def test_thirty_two_waiters_share_one_load_in_order(start: Start) -> None:
    service = await start({"a": {}}, {"a": {"load_seconds": 0.3}})
    authority = service.authority
    model = authority.resolve("a")
    tickets = [authority.ask(model) for _ in range(32)]
    urgent = authority.ask(model, priority=Priority.HIGH)
    await model.becomes(ModelState.LOADING)
    assert model.queue.waiters[0].id == urgent.id
    assert urgent.progress().stage == "loading"
    leases = [await ticket.wait(10) for ticket in [*tickets, urgent]]
    assert len({lease.process.pid for lease in leases if lease}) == 1
    assert (model.loads, model.in_flight) == (1, 33)
    for ticket in [*tickets, urgent]:
        ticket.close()
    assert model.state is ModelState.READY


async def test_a_ticket_given_up_before_during_and_after_a_load_leaves_nothing(start: Start) -> None:
    service = await start({"a": {}}, {"a": {"load_seconds": 0.2}})
    authority, model = service.authority, service.authority.resolve("a")
    service.estimator.gate = asyncio.Event()
    early = authority.ask(model)
    early.close()
    assert len(model.queue) == 0
    service.estimator.gate.set()
    during = authority.ask(model)
    await model.becomes(ModelState.LOADING)
    during.close()
    await model.becomes(ModelState.READY)
    after = authority.ask(model)
    after.close()
    assert (model.in_flight, len(model.queue)) == (0, 0)
    after.close()


async def test_a_lease_of_a_dead_worker_does_not_touch_its_successor(start: Start) -> None:
    service = await start({"a": {}})
    authority, model = service.authority, service.authority.resolve("a")
    old = await authority.ask(model).wait(10)
    assert old is not None
    os.kill(old.process.pid, signal.SIGKILL)
    await authority.reached(lambda: model.running is None)
    assert empty(service)
    fresh = await authority.ask(model).wait(10)
    assert fresh is not None
    old.release(completed=True)
    assert model.in_flight == 1
    fresh.release(completed=True)
    assert (model.in_flight, model.backoff.failures) == (0, 0)


async def test_failing_loads_back_off_and_tell_how_long(start: Start) -> None:
    service = await start({"a": {}}, {"a": {"fail": "startup"}})
    authority, model = service.authority, service.authority.resolve("a")
    for failures in (1, 2, 3):
        with pytest.raises(ModelFailed) as caught:
            await authority.ask(model).wait(10)
        assert caught.value.retry_after == pytest.approx(2 ** (failures - 1), abs=0.3)
        assert empty(service)
        status = authority.status(model)
        assert (status.state, model.backoff.failures) == (ModelState.FAILED, failures)
        assert status.retry_after_seconds == pytest.approx(2 ** (failures - 1), abs=0.3)
        await service.clock.advance(2 ** (failures - 1) - 0.1)


async def test_more_than_planned_fails_the_load(start: Start) -> None:
    service = await start({"a": {}}, {"a": {"buffers": 900 * MIB}})
    authority = service.authority
    with pytest.raises(ModelFailed, match=r"900\.0 MiB on cpu where 36\.0 MiB were planned"):
        await authority.ask(authority.resolve("a")).wait(10)
    assert empty(service)


async def test_deadlines_say_whether_it_waited_or_loaded(start: Start) -> None:
    service = await start({"a": {}}, {"a": {"load_seconds": 1.0}})
    authority, model = service.authority, service.authority.resolve("a")
    service.estimator.gate = asyncio.Event()
    with pytest.raises(DeadlineExceeded):
        await authority.ask(model, seconds=0.1).wait(5)
    service.estimator.gate.set()
    with pytest.raises(ModelLoading) as caught:
        await authority.ask(model, seconds=0.6).wait(5)
    assert caught.value.retry_after is not None
    assert caught.value.retry_after >= 1


async def test_a_busy_model_is_waited_for_and_then_evicted(start: Start) -> None:
    service = await start({"a": {}, "b": {}}, MEMORY_LIMIT_GB="0.15")
    authority = service.authority
    a, b = authority.resolve("a"), authority.resolve("b")
    lease = await authority.ask(a).wait(10)
    assert lease is not None
    ticket = authority.ask(b)
    assert await ticket.wait(0.3) is None
    assert authority.status(b).fits is None
    lease.release(completed=True)
    assert await ticket.wait(10) is not None
    assert a.state is ModelState.WARM, "the limit is one of loaded models"
    ticket.close()


async def test_a_refusal_is_final_and_has_numbers(start: Start) -> None:
    service = await start({"a": {}, "p": {"pinned": True}}, MEMORY_LIMIT_GB="0.15")
    authority = service.authority
    (await authority.ask(authority.resolve("p")).wait(10)).release()
    with pytest.raises(MemoryLimitExceededError) as caught:
        await authority.ask(authority.resolve("a")).wait(10)
    (shortage,) = caught.value.shortages
    assert shortage.need_bytes == 100 * MIB
    assert shortage.short_bytes > 0
    assert shortage.bound == "the memory limit"


async def test_unloading_a_busy_model_waits_for_what_runs(start: Start) -> None:
    service = await start({"a": {}})
    authority, model = service.authority, service.authority.resolve("a")
    lease = await authority.ask(model).wait(10)
    leaving = asyncio.create_task(authority.unload(model))
    await model.becomes(ModelState.DRAINING)
    waiting = authority.ask(model)
    assert await waiting.wait(0.2) is None
    lease.release(completed=True)
    await asyncio.wait_for(leaving, 10)
    assert await waiting.wait(10) is not None
    assert model.loads == 2
    waiting.close()


async def test_closing_tells_everybody_who_waits(start: Start) -> None:
    service = await start({"a": {}}, {"a": {"load_seconds": 5}})
    authority, model = service.authority, service.authority.resolve("a")
    ticket = authority.ask(model)
    await model.becomes(ModelState.LOADING)
    authority.end()
    with pytest.raises(ShuttingDown):
        await ticket.wait(1)
    with pytest.raises(ShuttingDown):
        authority.ask(model)
    await authority.emptied()


async def test_models_are_loaded_at_start_when_lazy_loading_is_off(start: Start) -> None:
    service = await start({"a": {}, "b": {}}, ENABLE_LAZY_MODEL_LOADING="false")
    models = service.authority.models.values()
    await service.authority.reached(lambda: all(model.state is ModelState.READY for model in models))


async def test_at_start_nobody_leaves_for_anybody(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Two fit of three: the first two are there and stay, and the log names the third."""
    service = await start({"a": {}, "b": {}, "c": {}}, ENABLE_LAZY_MODEL_LOADING="false", MEMORY_LIMIT_GB="0.25")
    await service.authority.reached(lambda: "c is not loaded at start: there is no room" in caplog.text)
    a, b, c = service.authority.models.values()
    await service.authority.reached(lambda: a.state is b.state is ModelState.READY)
    assert (c.state, c.loads) == (ModelState.COLD, 0)
    assert not service.authority.state.evictions


async def test_limits_on_the_number_of_models_evict(start: Start) -> None:
    service = await start({"a": {}, "b": {}}, MAX_MODELS="1")
    authority = service.authority
    for name in ("a", "b", "a"):
        ticket = authority.ask(authority.resolve(name))
        assert await ticket.wait(10) is not None
        ticket.close()
    assert sum(model.state is not ModelState.WARM for model in authority.models.values()) == 1


async def test_idle_timeout_zero_unloads_at_once(start: Start) -> None:
    service = await start({"a": {"idle_timeout": 0, "warm": False}})
    authority, model = service.authority, service.authority.resolve("a")
    lease = await authority.ask(model).wait(10)
    lease.release(completed=True)
    await authority.reached(lambda: model.state is ModelState.COLD and empty(service))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_chaos_gives_every_byte_and_place_back(start: Start, seed: int) -> None:
    """Random asks, departures, kills and unloads of four models that do not fit together."""
    chance = random.Random(seed)
    names = ["a", "b", "c", "d"]
    behavior = {"b": {"load_seconds": 0.15}, "d": {"fail": "oom_load"}}
    service = await start({name: {} for name in names}, behavior, MEMORY_LIMIT_GB="0.22")
    authority = service.authority

    async def use(name: str) -> None:
        patience, work = chance.uniform(0.05, 4), chance.uniform(0, 0.3)
        with authority.ask(authority.resolve(name), seconds=patience) as ticket:
            lease = await ticket.wait()
            await asyncio.sleep(work)
            assert lease is not None
            lease.release(completed=True)

    users: list[asyncio.Task[None]] = []
    for _ in range(80):
        name = chance.choice(names)
        model = authority.models[name]
        match chance.choice(["use", "use", "use", "use", "leave", "kill", "unload", "wait"]):
            case "use":
                users.append(asyncio.create_task(use(name)))
            case "leave" if users:
                chance.choice(users).cancel()
            case "kill" if model.running is not None:
                os.kill(model.running.worker.pid, signal.SIGKILL)
            case "unload":
                users.append(asyncio.create_task(authority.unload(model, now=chance.random() < 0.5)))
            case _:
                await asyncio.sleep(0.1)
        await asyncio.sleep(chance.uniform(0, 0.05))
    async with asyncio.timeout(40):
        results = await asyncio.gather(*users, return_exceptions=True)
    unexpected = [
        result for result in results if isinstance(result, Exception) and not isinstance(result, InferenceError)
    ]
    assert unexpected == []
    for model in authority.models.values():
        assert (model.in_flight, len(model.queue)) == (0, 0)
        await asyncio.wait_for(authority.unload(model, now=True), 10)
    assert not authority.state.tickets
    await authority.emptied()
    assert authority.balances()["cpu"].ours_bytes == 0
