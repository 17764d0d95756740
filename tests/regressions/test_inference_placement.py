"""Plans and dry runs: lost devices, changes during a measurement, numbers in refusals, time."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inference import settings
from inference.authority.handlers.watching.predictions import Predictions
from inference.authority.placement.ledger import Account, Ledger
from inference.authority.placement.plan import (
    EvictionState,
    Held,
    Option,
    Placement,
    Policy,
    Refusal,
    Request,
    Result,
    Stages,
    plan,
    refusal_now,
)
from inference.errors import DeviceLost, InvalidRequestError
from inference.estimate.model_estimate import Estimate
from inference.protocol import DeviceState
from tests.rigs.asgi import ask
from tests.rigs.authority_rig import MIB, FakeAccelerator, FakeEstimator, Start, rewrite


class _ByContext(FakeEstimator):
    """A model needs 100 MiB, or 200 MiB with a context other than 4096."""

    async def get(self, spec: Any, device: Any, *others: Any, counts: Any = ()) -> Estimate:
        if self.gate is not None:
            await self.gate.wait()
        self.sizes[spec.id] = 100 if spec.context_length == 4096 else 200
        return await super().get(spec, device, *others, counts=counts)


async def test_dry_run_uses_settings_that_a_reload_changes_during_its_measurement(start: Start, tmp_path: Path) -> None:
    estimator = _ByContext()
    estimator.gate = asyncio.Event()
    service = await start({"a": {"context_length": 4096}}, estimator=estimator)
    authority = service.authority
    planning = asyncio.create_task(authority.dry_run(authority.resolve("a"), {}))
    await asyncio.sleep(0)
    rewrite(tmp_path, {"a": {"context_length": 512}})
    authority.reload(settings.load(tmp_path, {"INFERENCE_FORCE_CPU_MODE": "true"}, {}))
    estimator.gate.set()
    decision, estimate = await asyncio.wait_for(planning, 10)
    assert isinstance(decision, Placement)
    assert sum(decision.need.values()) == 200 * MIB
    assert estimate is not None


async def test_dry_run_measures_a_device_that_appears_during_a_measurement(start: Start) -> None:
    estimator, accelerator = FakeEstimator(), FakeAccelerator()
    service = await start({"a": {}}, estimator=estimator, accelerator=accelerator)
    authority = service.authority
    estimator.gate = asyncio.Event()
    planning = asyncio.create_task(authority.dry_run(authority.resolve("a"), {"parallel": 1}))
    await asyncio.sleep(0)
    accelerator.gpus = FakeAccelerator(2).gpus
    estimator.gate.set()
    decision, _ = await asyncio.wait_for(planning, 10)
    assert decision.result == "FREE"
    assert any(line.startswith("gpu-1: fits") for line in decision.trace), decision.trace


async def test_second_of_two_simultaneous_moves_is_refused(start: Start) -> None:
    estimator = FakeEstimator()
    estimator.gate = asyncio.Event()
    service = await start({"a": {}}, estimator=estimator, accelerator=FakeAccelerator(2))
    authority, model = service.authority, service.authority.resolve("a")
    moves = [asyncio.create_task(authority.move(model, device)) for device in ("gpu-0", "gpu-1")]
    await asyncio.sleep(0)
    estimator.gate.set()
    first, second = await asyncio.gather(*moves, return_exceptions=True)
    assert first is None
    assert isinstance(second, InvalidRequestError)
    assert authority.status(model).devices == ("gpu-0",)


async def test_load_on_a_lost_device_names_the_device(start: Start) -> None:
    devices = FakeAccelerator(2)
    service = await start({"bound": {"gpu_index": 1}, "free": {}}, accelerator=devices)
    devices.change("gpu-1", state=DeviceState.LOST)
    with pytest.raises(DeviceLost, match="gpu-1 is lost"):
        await service.authority.load(service.authority.resolve("bound"))
    await service.authority.load(service.authority.resolve("free"))


async def test_plan_for_a_lost_device_names_the_device(start: Start) -> None:
    devices = FakeAccelerator(2)
    service = await start({"bound": {"gpu_index": 1}}, accelerator=devices)
    fits = (await ask(service.app, "POST", "/memory/plan", {"model": "bound"})).body
    assert fits["result"] == "FREE"
    devices.change("gpu-1", state=DeviceState.LOST)
    await service.authority.inventory.refresh()
    refused = (await ask(service.app, "POST", "/memory/plan", {"model": "bound"})).body
    assert refused["result"] == "CANT_ACCOMMODATE"
    assert "; gpu-1 is lost" in refused["reason"]


async def test_dry_run_of_a_loaded_model_plans_a_reload_only_for_other_settings(start: Start) -> None:
    service = await start({"a": {"context_length": 4096}}, estimator=_ByContext(), MEMORY_LIMIT_GB="0.25")
    authority = service.authority
    model = authority.resolve("a")
    (await authority.ask(model).wait(10)).release(completed=True)

    async def outcome(**changes: Any) -> tuple[Result, int, bool]:
        decision, _ = await authority.dry_run(model, changes)
        assert isinstance(decision, Placement)
        is_reload = "a is on cpu with other settings, and would be loaded again" in decision.trace
        return decision.result, sum(decision.need.values()) // MIB, is_reload

    assert await outcome() == (Result.DEPLOYED, 100, False)
    assert await outcome(context_length=4096) == (Result.DEPLOYED, 100, False)
    assert await outcome(context_length=8192) == (Result.FREE, 200, True)
    assert model.running is not None
    assert model.spec.context_length == 4096


def test_refusal_has_the_numbers_of_the_device_that_lacks_memory() -> None:
    ledger = Ledger()
    for name in ("gpu-0", "gpu-1"):
        ledger = ledger.open(Account(name, 150 * MIB, 135 * MIB)).observe(name, 0, 150 * MIB)
    holding = {"gpu-0": 7 * MIB}
    ledger = ledger.reserve("owner#1", "owner", holding).commit("owner#1", holding)
    owner = Held("owner", "owner#1", EvictionState.FIXED, holding, 0.0, 1.0, dedicated=True)
    ledger = ledger.observe("gpu-1", 120 * MIB, 30 * MIB)
    options = tuple(Option(name, {name: 60 * MIB}) for name in ("gpu-0", "gpu-1"))
    refusal = plan(Request("new", options), ledger, [owner], Policy(0.0))
    assert isinstance(refusal, Refusal)
    (lack,) = refusal.lacks
    assert (lack.device, lack.need_bytes, lack.free_bytes) == ("gpu-1", 60 * MIB, 30 * MIB)
    assert any("dedicated to owner" in line for line in refusal.trace), "the other device has a reason too"


async def test_prospect_of_a_reducible_model_is_unknown(start: Start) -> None:
    estimator = FakeEstimator()
    estimator.sizes = {"reducible": 5000, "fixed": 5000}
    models = {"reducible": {"oom_policy": "reduce"}, "fixed": {}}
    service = await start(models, accelerator=FakeAccelerator(), estimator=estimator)
    authority = service.authority
    for name in models:
        await authority.measure(name)
    predictions = Predictions(authority.state, authority.now)
    assert predictions.of(authority.model("reducible")) is None
    assert isinstance(predictions.of(authority.model("fixed")), Refusal)


MAX_SECONDS = 0.02 if sys.gettrace() is None else 0.1
"""Four times the allowed time of a turn, for slow machines; more under a tracer."""


def quickest(work: Callable[[], object], rounds: int = 7) -> float:
    """The shortest of several runs, because other processes slow some of them."""
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return min(times)


def crowd(count: int, devices: int = 1) -> tuple[Request, Ledger, list[Held]]:
    """Full devices with `count` idle models each, and a request for half of one device."""
    chance = random.Random(count)
    ledger, held = Ledger(), []
    for name in [f"gpu-{index}" for index in range(devices)]:
        sizes = [chance.randint(200, 1000) for _ in range(count)]
        ledger = ledger.open(Account(name, sum(sizes), sum(sizes)))
        for number, size in enumerate(sizes):
            id, need = f"{name}-{number}", {name: size}
            ledger = ledger.reserve(id, id, need).commit(id, need)
            used_at, reload_seconds = chance.uniform(0, 900), chance.uniform(0.5, 30)
            held.append(Held(id, id, EvictionState.IDLE, need, used_at, reload_seconds))
    options = tuple(Option(name, {name: account.capacity_bytes // 2}) for name, account in ledger.accounts.items())
    return Request("new", options), ledger, held


@pytest.mark.parametrize(("count", "devices"), [(10, 1), (40, 1), (10, 4)])
def test_plan_among_many_idle_models_is_fast(count: int, devices: int) -> None:
    request, ledger, held = crowd(count, devices)
    decision = plan(request, ledger, held, Policy(1000.0))
    assert decision.result is Result.FULL
    assert quickest(lambda: plan(request, ledger, held, Policy(1000.0))) < MAX_SECONDS


def test_prospects_of_fifty_models_are_fast() -> None:
    _, ledger, held = crowd(20)
    requests = [Request(f"m{number}", (Option("gpu-0", {"gpu-0": number * 400}),)) for number in range(50)]

    def look() -> list[object]:
        stages = Stages.of(ledger, held)
        return [refusal_now(request, stages, Policy(1000.0)) for request in requests]

    answers = look()
    assert None in answers
    assert any(answers)
    assert quickest(look) < MAX_SECONDS
