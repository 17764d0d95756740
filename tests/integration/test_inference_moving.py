"""A model goes to the device that an operator names, or stays where it was; several are loaded with one request."""

from __future__ import annotations

import asyncio

import pytest

from inference.api.memory_routes import preload
from inference.authority.lifecycle import Reason
from inference.authority.state import TimerKind
from inference.errors import DeadlineExceeded, InvalidRequestError, MemoryLimitExceededError, MemoryRefused
from inference.protocol import ModelState, Priority
from tests.rigs.asgi import ask
from tests.rigs.authority_rig import MIB, FakeAccelerator, Start


async def test_model_in_use_finishes_before_it_moves(start: Start) -> None:
    service = await start({"a": {}}, accelerator=FakeAccelerator(2))
    authority, model = service.authority, service.authority.resolve("a")
    lease = await authority.ask(model).wait(10)
    assert lease is not None
    before = model.running.placement.device
    other = {"gpu-0": "gpu-1", "gpu-1": "gpu-0"}[before]
    moving = asyncio.create_task(authority.move(model, other))
    await model.becomes(ModelState.DRAINING)
    newcomer = authority.ask(model)
    lease.release(completed=True)
    await asyncio.wait_for(moving, 20)
    assert (await newcomer.wait(1)) is not None
    newcomer.close()
    assert authority.status(model).devices == (other,)
    assert [record.reason for record in authority.state.evictions] == [Reason.MOVED]
    assert (model.target, model.old_device) == (None, None)
    pid = model.running.worker.pid
    await authority.move(model, other)
    assert model.running.worker.pid == pid, "it is there already"


async def test_cold_model_is_loaded_on_the_requested_device(start: Start) -> None:
    service = await start({"a": {}}, accelerator=FakeAccelerator(2))
    authority, model = service.authority, service.authority.resolve("a")
    for device in ("gpu-1", "cpu"):
        await authority.move(model, device)
        assert authority.status(model).devices == (device,)


async def test_move_that_does_not_fit_is_refused_with_numbers_and_changes_nothing(start: Start) -> None:
    accelerator = FakeAccelerator(2)
    accelerator.change("gpu-1", used_bytes=950 * MIB, free_bytes=50 * MIB)
    service = await start({"a": {}, "b": {"gpu_layers": 0}}, accelerator=accelerator)
    authority, model = service.authority, service.authority.resolve("a")
    await authority.move(model, "gpu-0")
    pid = model.running.worker.pid
    with pytest.raises(MemoryLimitExceededError) as caught:
        await authority.move(model, "gpu-1")
    (shortage,) = caught.value.shortages
    assert (shortage.device, shortage.need_bytes) == ("gpu-1", 100 * MIB)
    assert model.state is ModelState.READY
    assert model.running.worker.pid == pid
    for name, device, why in (("a", "gpu-7", "unknown device"), ("b", "gpu-0", "its gpu_layers is 0")):
        with pytest.raises(InvalidRequestError, match=why):
            await authority.move(authority.resolve(name), device)


async def test_failed_move_returns_the_model_to_its_device(start: Start) -> None:
    behavior = {"a": {"fail_on": {"gpu-1": "oom_load"}}}
    service = await start({"a": {}}, behavior, accelerator=FakeAccelerator(2))
    authority, model = service.authority, service.authority.resolve("a")
    await authority.move(model, "gpu-0")
    moving = asyncio.create_task(authority.move(model, "gpu-1"))
    await authority.reached(lambda: model.target == "gpu-1" and model.state is ModelState.LOADING)
    waiting = authority.ask(model)
    with pytest.raises(MemoryRefused, match="oom_load"):
        await asyncio.wait_for(moving, 20)
    assert await waiting.wait(10) is not None, "a waiting request is served on the old device"
    waiting.close()
    assert authority.status(model).devices == ("gpu-0",)
    assert model.target is None


@pytest.mark.parametrize("ends", ["disconnect", "deadline"])
async def test_model_stays_when_its_move_ends_before_its_requests(start: Start, ends: str) -> None:
    """A running request is not stopped after the drain time, and new ones need not wait for a load."""
    service = await start({"a": {}}, accelerator=FakeAccelerator(2))
    authority, model = service.authority, service.authority.resolve("a")
    await authority.move(model, "gpu-0")
    lease = await authority.ask(model).wait(10)
    assert lease is not None
    pid = model.running.worker.pid
    moving = asyncio.create_task(authority.move(model, "gpu-1", 0.2 if ends == "deadline" else None))
    await model.becomes(ModelState.DRAINING)
    if ends == "disconnect":
        moving.cancel()
    await asyncio.wait({moving})
    assert moving.cancelled() if ends == "disconnect" else isinstance(moving.exception(), DeadlineExceeded)
    newcomer = authority.ask(model)
    assert await newcomer.wait(1) is not None
    assert model.running.worker.pid == pid
    assert not [kind for kind, _ in authority.state.timers if kind is TimerKind.STOP]
    newcomer.close()
    lease.release(completed=True)


async def test_preloaded_models_wait_with_the_given_priority(start: Start) -> None:
    service = await start({"a": {}})
    model = service.authority.resolve("a")
    estimator = service.estimator
    estimator.gate = asyncio.Event()
    for priority in Priority:
        body = {"models": ["a"], "priority": str(priority)}
        asking = asyncio.create_task(ask(service.app, "POST", "/memory/preload", body))
        await service.authority.reached(lambda: bool(model.queue.waiters))
        assert {name: model.queue.count(name) for name in Priority} == {
            name: int(name is priority) for name in Priority
        }
        asking.cancel()
        await asyncio.wait({asking})
        await service.authority.reached(lambda: not model.queue.waiters)
    estimator.gate.set()
    (result,) = (await ask(service.app, "POST", "/memory/preload", {"models": ["a"], "priority": "low"})).body[
        "results"
    ]
    assert (result["model"], result["loaded"]) == ("a", True)


async def test_preload_returns_the_result_of_each_model(start: Start) -> None:
    service = await start({"a": {}, "p": {}, "big": {}}, {"p": {"fail": "startup"}}, MEMORY_LIMIT_GB="0.5")
    authority = service.authority
    service.estimator.sizes.update(big=900)
    a, p, big, unknown = await preload(authority.shell, ["a", "p", "big", "unknown", "a"], Priority.HIGH, 20)
    assert (a["model"], a["loaded"], a["state"], a["devices"], a["error"]) == ("a", True, "ready", ["cpu"], None)
    assert (p["loaded"], p["error"]["code"]) == (False, "model_failed")
    assert (big["loaded"], big["error"]["code"]) == (False, "memory_limit_exceeded")
    assert (unknown["model"], unknown["state"], unknown["error"]["code"]) == ("unknown", None, "model_not_found")
