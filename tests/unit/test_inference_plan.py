"""Planner: best fit, cheapest evictions, limits, dedicated devices, waits, divisions by layer, fixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from inference.authority.placement.ledger import Account, Ledger
from inference.authority.placement.plan import (
    Allocation,
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
from inference.authority.placement.smaller_settings import Fit, FitStep
from inference.authority.placement.spread import Spread
from inference.estimate.header_formula import Parameters
from inference.estimate.layers import Layers, Sizes

NOW = 1000.0
DEFAULT = Policy(NOW)


def machine(**sizes: int) -> Ledger:
    ledger = Ledger()
    for name, size in sizes.items():
        ledger = ledger.open(Account(name.replace("_", "-"), size, size))
    return ledger


def hold(
    ledger: Ledger,
    model: str,
    need: Mapping[str, int],
    eviction_state: EvictionState = EvictionState.IDLE,
    **more: float | bool,
) -> tuple[Ledger, Held]:
    ledger = ledger.reserve(model, model, need).commit(model, need)
    return ledger, Held(model, model, eviction_state, need, more.pop("last_used_at", 0.0), **more)  # type: ignore[arg-type]


def ask(*options: Option, dedicated: bool = False, spread: Spread | None = None) -> Request:
    return Request("new", options, dedicated, spread)


def placed(request: Request, ledger: Ledger, held: Sequence[Held] = (), policy: Policy = DEFAULT) -> Placement:
    decision = plan(request, ledger, held, policy)
    assert isinstance(decision, Placement), decision
    return decision


def rejected(request: Request, ledger: Ledger, held: Sequence[Held] = (), policy: Policy = DEFAULT) -> Refusal:
    decision = plan(request, ledger, held, policy)
    assert isinstance(decision, Refusal), decision
    return decision


def gpu(need: int, device: str = "gpu-0") -> Option:
    return Option(device, {device: need})


def test_tightest_device_that_fits_is_used() -> None:
    decision = placed(ask(gpu(300), gpu(300, "gpu-1")), machine(gpu_0=1000, gpu_1=400))
    assert (decision.result, decision.allocation, decision.device) == (Result.FREE, Allocation.FRACTIONAL, "gpu-1")


def test_loaded_model_is_deployed() -> None:
    ledger, held = hold(machine(gpu_0=1000), "new", {"gpu-0": 10})
    decision = placed(ask(gpu(10)), ledger, [held])
    assert decision.result is Result.DEPLOYED


def test_device_whose_evictions_look_equally_cheap_is_evaluated_exactly() -> None:
    """Fractions of models would be cheap on both devices, but only whole models leave."""
    ledger, small = hold(machine(gpu_0=1000, gpu_1=1000), "small", {"gpu-0": 500})
    ledger, large = hold(ledger, "large", {"gpu-1": 600})
    decision = placed(ask(gpu(900), gpu(850, "gpu-1")), ledger, [small, large])
    assert (decision.result, decision.device, decision.evict) == (Result.FULL, "gpu-0", ("small",))


def test_first_of_equally_expensive_devices_is_used() -> None:
    ledger, one = hold(machine(gpu_0=1000, gpu_1=1000), "one", {"gpu-0": 500})
    ledger, other = hold(ledger, "other", {"gpu-1": 500})
    decision = placed(ask(gpu(900), gpu(900, "gpu-1")), ledger, [one, other])
    assert (decision.result, decision.device, decision.evict) == (Result.FULL, "gpu-0", ("one",))


def test_device_with_more_expensive_evictions_is_not_used() -> None:
    ledger, small = hold(machine(gpu_0=1000, gpu_1=1000), "small", {"gpu-0": 500})
    ledger, large = hold(ledger, "large", {"gpu-1": 600}, reload_seconds=60.0)
    decision = placed(ask(gpu(900), gpu(900, "gpu-1")), ledger, [small, large])
    assert (decision.result, decision.device, decision.evict) == (Result.FULL, "gpu-0", ("small",))


def test_plan_waits_for_the_unload_of_the_same_model() -> None:
    ledger, held = hold(machine(gpu_0=1000), "new", {"gpu-0": 800}, EvictionState.LEAVING)
    decision = rejected(ask(gpu(800)), ledger, [held])
    assert decision.waits_for == ("new",)


def test_cheapest_set_is_evicted() -> None:
    ledger, big = hold(machine(gpu_0=1000), "big", {"gpu-0": 600}, reload_seconds=10.0)
    ledger, small = hold(ledger, "small", {"gpu-0": 300}, reload_seconds=1.0)
    decision = placed(ask(gpu(400)), ledger, [big, small])
    assert (decision.result, decision.evict) == (Result.FULL, ("small",))


def test_longest_idle_model_is_evicted_among_equals() -> None:
    ledger, fresh = hold(machine(gpu_0=1000), "fresh", {"gpu-0": 500}, last_used_at=NOW - 10)
    ledger, stale = hold(ledger, "stale", {"gpu-0": 500}, last_used_at=NOW - 900)
    decision = placed(ask(gpu(500)), ledger, [fresh, stale])
    assert decision.evict == ("stale",)


def test_many_candidates_are_chosen_greedily_without_needless_evictions() -> None:
    ledger, held = machine(gpu_0=1200), []
    for number in range(12):
        ledger, item = hold(ledger, f"m{number:02}", {"gpu-0": 100}, reload_seconds=float(number + 1))
        held.append(item)
    decision = placed(ask(gpu(250)), ledger, held)
    assert decision.evict == ("m00", "m01", "m02")


def test_needless_evictions_of_the_greedy_choice_are_removed() -> None:
    """Small models are chosen first, until a big one is enough alone."""
    ledger, held = machine(gpu_0=2000), []
    for number in range(11):
        ledger, item = hold(ledger, f"s{number:02}", {"gpu-0": 50}, reload_seconds=1.0)
        held.append(item)
    ledger, big = hold(ledger, "big", {"gpu-0": 1400}, reload_seconds=60.0)
    decision = placed(ask(gpu(1400)), ledger, [*held, big])
    assert decision.evict == ("big",)


def test_memory_of_an_evicted_model_counts_as_free() -> None:
    """The last reading still shows the device as full."""
    ledger, held = hold(machine(gpu_0=1000), "idle", {"gpu-0": 800})
    ledger = ledger.observe("gpu-0", 800, 200)
    decision = placed(ask(gpu(900)), ledger, [held])
    assert decision.evict == ("idle",)


def test_foreign_bytes_are_kept_when_the_limit_of_a_device_changes() -> None:
    ledger = machine(cpu=1000).observe("cpu", 300, 700).open(Account("cpu", 500, 500))
    assert ledger.balance("cpu").foreign_bytes == 300
    assert ledger.balance("cpu").room_bytes == 200


@pytest.mark.parametrize("eviction_state", [EvictionState.YOUNG, EvictionState.BUSY, EvictionState.LOADING])
def test_plan_waits_for_models_that_cannot_be_evicted_yet(eviction_state: EvictionState) -> None:
    ledger, held = hold(machine(gpu_0=1000), "other", {"gpu-0": 800}, eviction_state)
    decision = rejected(ask(gpu(400)), ledger, [held])
    assert decision.waits_for == ("other",)
    assert str(eviction_state) in decision.reason


def test_no_more_models_are_evicted_while_one_is_unloaded() -> None:
    ledger, leaver = hold(machine(gpu_0=1000), "leaver", {"gpu-0": 500}, EvictionState.LEAVING)
    ledger, idle = hold(ledger, "idle", {"gpu-0": 500})
    decision = rejected(ask(gpu(500)), ledger, [leaver, idle])
    assert decision.waits_for == ("leaver",)


def test_pinned_models_stay_and_the_rejection_has_numbers() -> None:
    ledger, held = hold(machine(gpu_0=1000), "pinned", {"gpu-0": 800}, EvictionState.FIXED)
    decision = rejected(ask(gpu(400)), ledger, [held])
    (lack,) = decision.lacks
    assert (lack.need_bytes, lack.free_bytes, decision.waits_for) == (400, 200, ())


def test_limits_on_the_number_of_models_evict() -> None:
    ledger, held = hold(machine(gpu_0=1000), "other", {"gpu-0": 10})
    for policy in (Policy(NOW, max_models=1), Policy(NOW, max_models_per_device=1)):
        decision = placed(ask(gpu(10)), ledger, [held], policy)
        assert decision.evict == ("other",)


def test_dedicated_model_uses_a_device_exclusively() -> None:
    ledger, held = hold(machine(gpu_0=1000, gpu_1=1000), "other", {"gpu-0": 10}, EvictionState.BUSY)
    decision = placed(ask(gpu(10), gpu(10, "gpu-1"), dedicated=True), ledger, [held])
    assert (decision.allocation, decision.device) == (Allocation.WHOLE, "gpu-1")
    ledger, owner = hold(machine(gpu_0=1000), "owner", {"gpu-0": 10}, EvictionState.FIXED, dedicated=True)
    refusal = rejected(ask(gpu(10)), ledger, [owner])
    assert "dedicated to owner" in refusal.reason


def test_cpu_fallback_is_the_last_resort() -> None:
    fallback = Option("cpu", {"cpu": 400}, fallback=True)
    ledger, idle = hold(machine(gpu_0=1000, cpu=1000), "idle", {"gpu-0": 800})
    decision = placed(ask(gpu(400), fallback), ledger, [idle])
    assert (decision.device, decision.evict) == ("gpu-0", ("idle",))
    decision = placed(ask(gpu(2000), fallback), machine(gpu_0=1000, cpu=1000))
    assert decision.device == "cpu"


def test_rejection_without_any_device_has_a_reason() -> None:
    decision = rejected(Request("new", ()), machine(cpu=1000))
    assert (decision.result, decision.waits_for) == (Result.CANT_ACCOMMODATE, ())
    assert "lost" in decision.reason


def layered(
    over: tuple[str, ...] = ("gpu-0",),
    *,
    count: int = 4,
    weights: int = 100,
    kv: int = 200,
    experts: int = 0,
    **settings: int | str,
) -> Spread:
    """Layers of `weights` + `kv` bytes, with `experts` in the weights, and a head of 100 bytes."""
    parameters = Parameters(**{"context_length": 1024, "parallel": 1, "gpu_layers": -1 if over else 0} | settings)  # type: ignore[arg-type]
    return Spread(Layers(parameters, (Sizes(weights, kv, True, experts),) * count, 100, 0, 0, 0), over, {})


def alone(spread: Spread) -> Option:
    """The spread on its first device, or on the host."""
    first = spread.over[0] if spread.over else "cpu"
    return Option(first, spread.need({first: spread.layers.offloaded} if spread.over else {}))


@pytest.mark.parametrize(
    ("spread", "rooms", "fix"),
    [
        (layered(parallel=4), (800, 0), {"parallel": 1}),
        (layered(parallel=4), (1000, 0), {"parallel": 2}),
        (layered(parallel=4), (630, 0), {"parallel": 1, "context_length": 512}),
        (layered(), (1000, 0), {"kv_type": "q8_0"}),
        (layered(), (760, 0), {"kv_type": "q4_0"}),
        (layered(kv_type="q8_0"), (1000, 0), {"context_length": 512}),
        (layered(flash_attention=False), (1000, 0), {"context_length": 512}),
        (layered(kv=0), (300, 200), {"gpu_layers": 3}),
        (layered(kv=0), (300, 0), {}),
        (layered(kv=0), (50, 900), {}),
        (layered(kv=100), (410, 330), {"context_length": 512, "gpu_layers": 3}),
        (layered(kv=0, experts=80), (300, 250), {"experts": 3}),
        (layered(kv=0, experts=80), (300, 150), {}),
        (layered(kv=100, experts=80), (425, 330), {"context_length": 512, "experts": 4}),
        (layered((), parallel=4), (0, 800), {"parallel": 1}),
        (layered((), kv=0), (0, 100), {}),
        (layered(parallel=4, kv_cells=2048), (1100, 0), {"kv_cells": 1280}),
        (layered(parallel=4, kv_cells=2048), (710, 0), {"kv_cells": 512, "context_length": 512}),
        (layered(parallel=4, kv_cells=1024), (1000, 0), {"kv_type": "q8_0"}),
        (
            layered(parallel=4, kv_cells=1024, kv=100),
            (410, 330),
            {"context_length": 512, "kv_cells": 512, "gpu_layers": 3},
        ),
    ],
)
def test_suggested_fix_changes_as_little_as_possible(
    spread: Spread, rooms: tuple[int, int], fix: dict[str, object]
) -> None:
    ledger = machine(gpu_0=rooms[0], cpu=rooms[1])
    decision = rejected(ask(alone(spread), spread=spread), ledger)
    assert decision.fix == fix


C, E, L = FitStep.CONTEXT, FitStep.EXPERTS, FitStep.LAYERS


@pytest.mark.parametrize(
    ("spread", "steps", "rooms", "fix"),
    [
        # 4 layers of 100 + 200 bytes and a head of 100; 80 of the 100 are experts
        (layered(experts=80), (E,), (1250, 320), {"experts": 1}),
        (layered(experts=80), (E,), (1100, 320), {"experts": 3}),
        (layered(experts=80), (E,), (970, 320), {}),
        (layered(experts=80), (E,), (1100, 230), {}),
        (layered(), (E,), (1250, 320), {}),
        (layered(experts=80, host_expert_layers=2), (E,), (1100, 320), {"experts": 3}),
        (layered(experts=80, gpu_layers=3), (E,), (620, 900), {"experts": 3}),
        (layered(context_length=2048), (C,), (1250, 0), {"context_length": 1792}),
        (layered(context_length=2048), (C,), (930, 0), {"context_length": 1024}),
        (layered(context_length=2048), (C,), (900, 0), {}),
        (layered(context_length=1000), (C,), (1250, 0), {}),
        (
            layered(context_length=2048, parallel=2, kv_cells=3000), (C,), (930, 0),
            {"context_length": 1024, "kv_cells": 1500},
        ),
        (layered(context_length=2048, experts=80), (C, E), (930, 80), {"context_length": 1024}),
        (layered(context_length=2048, experts=80), (C, E), (850, 320), {"context_length": 1024, "experts": 1}),
        (layered(experts=80), (C, E), (1100, 320), {"experts": 3}),
        (layered(kv=0), (L,), (300, 200), {"gpu_layers": 3}),
        (layered(kv=0, experts=80), (E, L), (160, 400), {"experts": 4, "gpu_layers": 4}),
        (
            layered(context_length=2048, kv=100, experts=80), (C, E, L), (300, 600),
            {"context_length": 1024, "experts": 4, "gpu_layers": 3},
        ),
        (layered(kv=0), (C, E), (300, 200), {}),
    ],
)  # fmt: skip
def test_change_that_is_allowed_changes_as_little_as_possible(
    spread: Spread, steps: tuple[FitStep, ...], rooms: tuple[int, int], fix: dict[str, object]
) -> None:
    """In the order context, experts, layers; each step with the minimum of those before it."""
    fit, ledger = Fit(steps, min_context=1024), machine(gpu_0=rooms[0], cpu=rooms[1])
    decision = rejected(replace(ask(alone(spread), spread=spread), fit=fit), ledger)
    assert fit.allows(decision.fix) == bool(fix)
    if fix:
        assert decision.fix == fix


def test_shortest_allowed_context_need_not_be_a_multiple() -> None:
    spread = layered(context_length=2048)
    wanted = replace(ask(alone(spread), spread=spread), fit=Fit((C,), min_context=1000))
    assert rejected(wanted, machine(gpu_0=906, cpu=0)).fix == {"context_length": 1000}


@pytest.mark.parametrize(
    ("fix", "allowed"),
    [
        ({"context_length": 1024, "kv_cells": 1500}, True), ({"context_length": 1023}, False), ({}, False),
        ({"context_length": 1024, "experts": 1}, False), ({"parallel": 1}, False), ({"gpu_layers": 3}, True),
    ],
)  # fmt: skip
def test_only_configured_steps_are_allowed(fix: dict[str, object], allowed: bool) -> None:
    assert Fit((C, L), min_context=1024).allows(fix) is allowed


def test_allowed_change_is_preferred_to_the_fallback() -> None:
    spread = layered(experts=80)
    fallback = Option("cpu", {"cpu": 1300}, fallback=True)
    wanted = ask(alone(spread), fallback, spread=spread)
    for room, device in ((1000, None), (970, "cpu")):
        ledger = machine(gpu_0=room, cpu=1300)
        decision = plan(replace(wanted, fit=Fit((E,))), ledger, [], DEFAULT)
        assert (decision.device if isinstance(decision, Placement) else None) == device
    assert placed(wanted, machine(gpu_0=1000, cpu=1300)).device == "cpu"


def test_model_too_large_for_one_device_is_divided_by_layer() -> None:
    """Over as few devices as possible, evenly; it is measured before it is booked."""
    spread = layered(("gpu-0", "gpu-1", "gpu-2"))
    ledger = machine(gpu_0=500, gpu_1=1000, gpu_2=700, cpu=100)
    decision = placed(ask(*(gpu(1300, name) for name in spread.over), spread=spread), ledger)
    assert (decision.result, decision.allocation) == (Result.FREE, Allocation.SPLIT)
    assert dict(zip(decision.devices, decision.tensor_split, strict=True)) == {"gpu-1": 3.0, "gpu-2": 2.0}
    assert decision.need == {"gpu-1": 900, "gpu-2": 400, "cpu": 0}
    assert not decision.measured


def test_measured_division_is_used_unchanged() -> None:
    spread = layered(("gpu-0", "gpu-1"))
    measured = Option("gpu-0", {"gpu-0": 650, "gpu-1": 680, "cpu": 0}, layers={"gpu-0": 2, "gpu-1": 3})
    ledger = machine(gpu_0=1000, gpu_1=1000, cpu=100)
    wanted = ask(gpu(1300), gpu(1300, "gpu-1"), measured, spread=spread)
    decision = placed(wanted, ledger)
    assert decision.measured
    assert (decision.need, decision.tensor_split) == (measured.need, (2.0, 3.0))


def test_division_over_free_devices_is_preferred_to_evictions() -> None:
    spread = layered(("gpu-0", "gpu-1"))
    ledger, idle = hold(machine(gpu_0=1400, gpu_1=700, cpu=100), "idle", {"gpu-0": 500})
    decision = placed(ask(gpu(1300), gpu(1300, "gpu-1"), spread=spread), ledger, [idle])
    assert (decision.result, decision.evict) == (Result.FREE, ())


def test_cheapest_models_are_evicted_for_a_division() -> None:
    spread = layered(("gpu-0", "gpu-1"))
    ledger, dear = hold(machine(gpu_0=1000, gpu_1=1000, cpu=100), "dear", {"gpu-0": 900}, reload_seconds=60.0)
    ledger, cheap = hold(ledger, "cheap", {"gpu-1": 600})
    ledger, small = hold(ledger, "small", {"gpu-1": 300})
    wanted = ask(gpu(1900), gpu(1900, "gpu-1"), spread=layered(("gpu-0", "gpu-1"), count=3, kv=0))
    decision = placed(wanted, ledger, [dear, cheap, small])
    assert (decision.result, decision.evict) == (Result.FULL, ("small",))
    larger = placed(ask(gpu(1300), spread=spread), ledger, [dear, cheap, small])
    assert set(larger.evict) == {"dear", "small"}


@pytest.mark.parametrize(
    ("reload_seconds", "evicted", "devices"), [(1.5, "small", {"gpu-0", "gpu-1"}), (1.6, "big", {"gpu-0"})]
)
def test_one_device_is_preferred_unless_its_evictions_cost_over_a_tenth_more(
    reload_seconds: float, evicted: str, devices: set[str]
) -> None:
    """One device costs 600 bytes x 1 s; two cost 350 bytes x 1.5 or 1.6 s."""
    spread = layered(("gpu-0", "gpu-1"), count=7, kv=0)
    ledger, big = hold(machine(gpu_0=1000, gpu_1=700, cpu=100), "big", {"gpu-0": 600}, last_used_at=NOW)
    more = {"last_used_at": NOW, "reload_seconds": reload_seconds}
    ledger, small = hold(ledger, "small", {"gpu-1": 350}, **more)
    decision = placed(ask(gpu(800), gpu(800, "gpu-1"), spread=spread), ledger, [big, small])
    assert (decision.result, decision.evict, set(decision.devices)) == (Result.FULL, (evicted,), devices)


def test_division_waits_for_leaving_and_busy_models() -> None:
    spread = layered(("gpu-0", "gpu-1"))
    for eviction_state in (EvictionState.LEAVING, EvictionState.BUSY):
        ledger, held = hold(machine(gpu_0=700, gpu_1=700, cpu=100), "other", {"gpu-0": 700}, eviction_state)
        decision = rejected(ask(gpu(1300), gpu(1300, "gpu-1"), spread=spread), ledger, [held])
        assert decision.waits_for == ("other",)


def test_division_respects_all_limits() -> None:
    """Dedicated devices, numbers of models, the memory limit and host memory."""
    spread = layered(("gpu-0", "gpu-1"))
    wanted = ask(gpu(1300), gpu(1300, "gpu-1"), spread=spread)
    base = machine(gpu_0=700, gpu_1=700, cpu=100)
    ledger, held = hold(base, "owner", {"gpu-0": 1}, EvictionState.FIXED, dedicated=True)
    rejected(wanted, ledger, [held])
    ledger, held = hold(base, "idle", {"gpu-0": 1, "cpu": 10})
    for policy in (Policy(NOW, max_models=1), Policy(NOW, max_models_per_device=1)):
        decision = placed(wanted, ledger, [held], policy)
        assert decision.evict == ("idle",)
    limited = replace(ledger, limit_bytes=1305)
    decision = placed(wanted, limited, [held])
    assert decision.evict == ("idle",)
    hosted = replace(spread, overhead={"cpu": 95})
    decision = placed(replace(wanted, spread=hosted), ledger, [held])
    assert decision.evict == ("idle",)
    rejected(replace(wanted, spread=replace(spread, overhead={"cpu": 101})), ledger, [held])


def test_no_fix_is_suggested_if_the_number_of_models_is_the_limit() -> None:
    ledger, held = hold(machine(gpu_0=900, cpu=0), "pinned", {"gpu-0": 100}, EvictionState.FIXED)
    spread = layered(parallel=4)
    for most, has_fix in ((2, True), (1, False)):
        decision = rejected(ask(alone(spread), spread=spread), ledger, [held], Policy(NOW, max_models=most))
        assert decision.lacks
        assert bool(decision.fix) is has_fix


def test_models_on_other_devices_are_not_evicted_for_a_division() -> None:
    spread = layered(("gpu-0", "gpu-1"))
    ledger, away = hold(machine(gpu_0=700, gpu_1=700, gpu_2=500, cpu=100), "away", {"gpu-2": 1, "cpu": 10})
    ledger, idle = hold(ledger, "idle", {"gpu-0": 600})
    decision = placed(ask(gpu(1300), gpu(1300, "gpu-1"), spread=spread), ledger, [away, idle])
    assert decision.evict == ("idle",)


def test_dedicated_model_may_use_several_devices_exclusively() -> None:
    spread = layered(("gpu-0", "gpu-1", "gpu-2"))
    ledger, held = hold(machine(gpu_0=700, gpu_1=700, gpu_2=700, cpu=100), "other", {"gpu-0": 1}, EvictionState.BUSY)
    wanted = ask(*(gpu(1300, name) for name in spread.over), dedicated=True, spread=spread)
    decision = placed(wanted, ledger, [held])
    assert decision.allocation is Allocation.WHOLE
    assert set(decision.devices) == {"gpu-1", "gpu-2"}


def test_model_on_a_fixed_device_or_with_one_layer_is_not_divided() -> None:
    for spread in (
        layered(("gpu-0",)),
        layered(("gpu-0", "gpu-1"), gpu_layers=1),
        replace(layered(("gpu-0", "gpu-1")), divide=False),
    ):
        rejected(ask(gpu(1300), spread=spread), machine(gpu_0=700, gpu_1=700, cpu=9000))


def test_layers_are_divided_over_many_devices() -> None:
    names = tuple(f"gpu-{number}" for number in range(6))
    spread = layered(names, count=11, kv=0)
    ledger = machine(**{name.replace("-", "_"): 200 + number for number, name in enumerate(names)}, cpu=10)
    decision = placed(ask(gpu(1200), spread=spread), ledger)
    assert len(decision.devices) == 6
    assert sum(decision.tensor_split) == 12
    smaller = machine(**{name.replace("-", "_"): 199 for name in names}, cpu=10)
    refusal = rejected(ask(gpu(1200), spread=spread), smaller)
    assert "nor divided over" in refusal.reason


def test_devices_that_cannot_share_a_model_are_named_with_the_reason() -> None:
    """The mode makes no difference where one device suffices."""
    spread = replace(layered(("gpu-0", "gpu-1")), obstacle="no split buffers; set split_mode: layer")
    refusal = rejected(ask(gpu(1300), spread=spread), machine(gpu_0=700, gpu_1=700, cpu=9000))
    assert refusal.undivided == spread.obstacle
    assert refusal.reason.endswith("; it is not divided over gpu-0, gpu-1: no split buffers; set split_mode: layer")
    assert placed(ask(gpu(1300), spread=spread), machine(gpu_0=1300, gpu_1=700, cpu=9000)).devices == ("gpu-0",)


def test_devices_that_share_each_layer_have_proportional_parts() -> None:
    """A device may have room for less than one layer; there are no copies of inputs."""
    spread = layered(("gpu-0", "gpu-1"), count=1, weights=900, kv=1000, ubatch=1)
    assert spread.layers.sums == (0, 1900, 2000)
    shared = replace(spread, layers=replace(spread.layers, by_tensor=True))
    assert shared.layers.sums == (0, 1000, 2000)
    assert shared.layers.copies_bytes == 0
    ledger = machine(gpu_0=1100, gpu_1=1100, cpu=10)
    rejected(ask(gpu(2000), spread=spread), ledger)
    decision = placed(replace(ask(gpu(2000), spread=shared), split_mode="tensor"), ledger)
    assert (decision.tensor_split, decision.need["gpu-0"]) == ((1.0, 1.0), 1000)
    assert decision.trace[-1].endswith("fits, divided by tensor")


@pytest.mark.parametrize(
    ("overhead", "rooms", "used"),
    [
        ({"gpu-0": 50}, (1000, 900, 900), {"gpu-1", "gpu-2"}),
        ({"gpu-0": 50, "gpu-1": 50}, (1000, 900, 900), None),
        ({"gpu-0": 50}, (1000, 600, 600), None),
    ],
    ids=["another pair", "no pair has so little overhead", "the pair with less overhead has no room"],
)
def test_devices_with_less_overhead_are_used_before_models_are_evicted_for_the_memory_limit(
    overhead: dict[str, int], rooms: tuple[int, int, int], used: set[str] | None
) -> None:
    """1300 bytes of 1305; the devices with the largest rooms have an overhead of 50 bytes."""
    spread = replace(layered(("gpu-0", "gpu-1", "gpu-2")), overhead=overhead)
    ledger = machine(gpu_0=rooms[0], gpu_1=rooms[1], gpu_2=rooms[2], cpu=100)
    ledger, idle = hold(replace(ledger, limit_bytes=1405), "idle", {"cpu": 100})
    wanted = ask(*(gpu(1300 + overhead.get(name, 0), name) for name in spread.over), spread=spread)
    decision = placed(wanted, ledger, [idle])
    assert decision.evict == (() if used else ("idle",))
    assert used is None or {*decision.devices} == used


def test_prospect_is_computed_without_choosing_evictions() -> None:
    ledger, held = hold(machine(gpu_0=1000), "old", {"gpu-0": 900})
    stages = Stages.of(ledger, [held])
    assert refusal_now(ask(gpu(500)), stages, Policy(NOW)) is None
    refusal = refusal_now(ask(gpu(1500)), stages, Policy(NOW))
    assert refusal is not None
    assert refusal.result is Result.CANT_ACCOMMODATE
