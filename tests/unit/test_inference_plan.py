"""Where models go: best fit, cheapest evictions, limits, dedicated devices, waits and fixes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from inference.authority.placement.layers import Layers, Sizes
from inference.authority.placement.ledger import Account, Ledger
from inference.authority.placement.plan import (
    Allocation,
    Held,
    Option,
    Placement,
    Policy,
    Refusal,
    Request,
    Result,
    Scene,
    Standing,
    plan,
    prospect,
)
from inference.authority.placement.spread import Spread
from inference.estimate.header_formula import Parameters

NOW = 1000.0


def machine(**sizes: int) -> Ledger:
    ledger = Ledger()
    for name, size in sizes.items():
        ledger = ledger.open(Account(name.replace("_", "-"), size, size))
    return ledger


def hold(
    ledger: Ledger, model: str, need: Mapping[str, int], standing: Standing = Standing.IDLE, **more: float | bool
) -> tuple[Ledger, Held]:
    ledger = ledger.reserve(model, model, need).commit(model, need)
    return ledger, Held(model, model, standing, need, more.pop("last_used_at", 0.0), **more)  # type: ignore[arg-type]


def ask(*options: Option, dedicated: bool = False, spread: Spread | None = None) -> Request:
    return Request("new", options, dedicated, spread)


def gpu(need: int, device: str = "gpu-0") -> Option:
    return Option(device, {device: need})


def test_the_tightest_device_that_fits_is_taken() -> None:
    decision = plan(ask(gpu(300), gpu(300, "gpu-1")), machine(gpu_0=1000, gpu_1=400), [], Policy(NOW))
    assert isinstance(decision, Placement)
    assert (decision.result, decision.allocation, decision.device) == (Result.FREE, Allocation.FRACTIONAL, "gpu-1")


def test_a_loaded_model_is_deployed() -> None:
    ledger, held = hold(machine(gpu_0=1000), "new", {"gpu-0": 10})
    decision = plan(ask(gpu(10)), ledger, [held], Policy(NOW))
    assert isinstance(decision, Placement)
    assert decision.result is Result.DEPLOYED


def test_a_device_that_looks_hardly_dearer_is_looked_at_and_left() -> None:
    """Parts of models would be cheap on both, but only whole ones leave."""
    ledger, small = hold(machine(gpu_0=1000, gpu_1=1000), "small", {"gpu-0": 500})
    ledger, large = hold(ledger, "large", {"gpu-1": 600})
    decision = plan(ask(gpu(900), gpu(850, "gpu-1")), ledger, [small, large], Policy(NOW))
    assert isinstance(decision, Placement)
    assert (decision.result, decision.device, decision.evict) == (Result.FULL, "gpu-0", ("small",))


def test_of_devices_that_cost_the_same_the_first_is_taken() -> None:
    ledger, one = hold(machine(gpu_0=1000, gpu_1=1000), "one", {"gpu-0": 500})
    ledger, other = hold(ledger, "other", {"gpu-1": 500})
    decision = plan(ask(gpu(900), gpu(900, "gpu-1")), ledger, [one, other], Policy(NOW))
    assert isinstance(decision, Placement)
    assert (decision.result, decision.device, decision.evict) == (Result.FULL, "gpu-0", ("one",))


def test_a_device_where_even_parts_of_models_would_be_dearer_is_left() -> None:
    ledger, small = hold(machine(gpu_0=1000, gpu_1=1000), "small", {"gpu-0": 500})
    ledger, large = hold(ledger, "large", {"gpu-1": 600}, reload_seconds=60.0)
    decision = plan(ask(gpu(900), gpu(900, "gpu-1")), ledger, [small, large], Policy(NOW))
    assert isinstance(decision, Placement)
    assert (decision.result, decision.device, decision.evict) == (Result.FULL, "gpu-0", ("small",))


def test_its_own_leaving_predecessor_is_waited_for() -> None:
    ledger, held = hold(machine(gpu_0=1000), "new", {"gpu-0": 800}, Standing.LEAVING)
    decision = plan(ask(gpu(800)), ledger, [held], Policy(NOW))
    assert isinstance(decision, Refusal)
    assert decision.waits_for == ("new",)


def test_the_cheapest_set_leaves() -> None:
    ledger, big = hold(machine(gpu_0=1000), "big", {"gpu-0": 600}, reload_seconds=10.0)
    ledger, small = hold(ledger, "small", {"gpu-0": 300}, reload_seconds=1.0)
    decision = plan(ask(gpu(400)), ledger, [big, small], Policy(NOW))
    assert isinstance(decision, Placement)
    assert (decision.result, decision.evict) == (Result.FULL, ("small",))


def test_among_equals_the_longest_idle_leaves() -> None:
    ledger, fresh = hold(machine(gpu_0=1000), "fresh", {"gpu-0": 500}, last_used_at=NOW - 10)
    ledger, stale = hold(ledger, "stale", {"gpu-0": 500}, last_used_at=NOW - 900)
    decision = plan(ask(gpu(500)), ledger, [fresh, stale], Policy(NOW))
    assert isinstance(decision, Placement)
    assert decision.evict == ("stale",)


def test_many_candidates_are_weighed_greedily_and_nobody_leaves_in_vain() -> None:
    ledger, held = machine(gpu_0=1200), []
    for number in range(12):
        ledger, item = hold(ledger, f"m{number:02}", {"gpu-0": 100}, reload_seconds=float(number + 1))
        held.append(item)
    decision = plan(ask(gpu(250)), ledger, held, Policy(NOW))
    assert isinstance(decision, Placement)
    assert decision.evict == ("m00", "m01", "m02")


def test_a_model_that_leaves_makes_needless_victims_stay() -> None:
    """Cheapest first collects small ones until a big one makes the room alone: the small ones stay then."""
    ledger, held = machine(gpu_0=2000), []
    for number in range(11):
        ledger, item = hold(ledger, f"s{number:02}", {"gpu-0": 50}, reload_seconds=1.0)
        held.append(item)
    ledger, big = hold(ledger, "big", {"gpu-0": 1400}, reload_seconds=60.0)
    decision = plan(ask(gpu(1400)), ledger, [*held, big], Policy(NOW))
    assert isinstance(decision, Placement)
    assert decision.evict == ("big",)


def test_what_a_victim_frees_is_taken_to_be_seen_free() -> None:
    """The last reading says the device is full; who leaves makes it less so."""
    ledger, held = hold(machine(gpu_0=1000), "idle", {"gpu-0": 800})
    ledger = ledger.observe("gpu-0", 800, 200)
    decision = plan(ask(gpu(900)), ledger, [held], Policy(NOW))
    assert isinstance(decision, Placement)
    assert decision.evict == ("idle",)


def test_an_account_keeps_what_was_seen_when_its_allowance_changes() -> None:
    ledger = machine(cpu=1000).observe("cpu", 300, 700).open(Account("cpu", 500, 500))
    assert ledger.balance("cpu").foreign_bytes == 300
    assert ledger.balance("cpu").room_bytes == 200


@pytest.mark.parametrize("standing", [Standing.YOUNG, Standing.BUSY, Standing.LOADING])
def test_room_held_by_those_who_cannot_leave_yet_is_waited_for(standing: Standing) -> None:
    ledger, held = hold(machine(gpu_0=1000), "other", {"gpu-0": 800}, standing)
    decision = plan(ask(gpu(400)), ledger, [held], Policy(NOW))
    assert isinstance(decision, Refusal)
    assert decision.waits_for == ("other",)
    assert str(standing) in decision.reason


def test_nobody_else_leaves_while_room_is_being_made() -> None:
    ledger, leaver = hold(machine(gpu_0=1000), "leaver", {"gpu-0": 500}, Standing.LEAVING)
    ledger, idle = hold(ledger, "idle", {"gpu-0": 500})
    decision = plan(ask(gpu(500)), ledger, [leaver, idle], Policy(NOW))
    assert isinstance(decision, Refusal)
    assert decision.waits_for == ("leaver",)


def test_pinned_models_stay_and_the_refusal_has_numbers() -> None:
    ledger, held = hold(machine(gpu_0=1000), "pinned", {"gpu-0": 800}, Standing.FIXED)
    decision = plan(ask(gpu(400)), ledger, [held], Policy(NOW))
    assert isinstance(decision, Refusal)
    (lack,) = decision.lacks
    assert (lack.need_bytes, lack.room_bytes, decision.waits_for) == (400, 200, ())


def test_limits_on_counts_evict_too() -> None:
    ledger, held = hold(machine(gpu_0=1000), "other", {"gpu-0": 10})
    for policy in (Policy(NOW, max_models=1), Policy(NOW, max_models_per_device=1)):
        decision = plan(ask(gpu(10)), ledger, [held], policy)
        assert isinstance(decision, Placement)
        assert decision.evict == ("other",)


def test_a_dedicated_model_wants_its_device_alone_and_keeps_it() -> None:
    ledger, held = hold(machine(gpu_0=1000, gpu_1=1000), "other", {"gpu-0": 10}, Standing.BUSY)
    decision = plan(ask(gpu(10), gpu(10, "gpu-1"), dedicated=True), ledger, [held], Policy(NOW))
    assert isinstance(decision, Placement)
    assert (decision.allocation, decision.device) == (Allocation.WHOLE, "gpu-1")
    ledger, owner = hold(machine(gpu_0=1000), "owner", {"gpu-0": 10}, Standing.FIXED, dedicated=True)
    refusal = plan(ask(gpu(10)), ledger, [owner], Policy(NOW))
    assert isinstance(refusal, Refusal)
    assert "dedicated to owner" in refusal.reason


def test_the_cpu_fallback_is_used_only_when_nothing_else_is_possible() -> None:
    fallback = Option("cpu", {"cpu": 400}, fallback=True)
    ledger, idle = hold(machine(gpu_0=1000, cpu=1000), "idle", {"gpu-0": 800})
    decision = plan(ask(gpu(400), fallback), ledger, [idle], Policy(NOW))
    assert isinstance(decision, Placement)
    assert (decision.device, decision.evict) == ("gpu-0", ("idle",))
    decision = plan(ask(gpu(2000), fallback), machine(gpu_0=1000, cpu=1000), [], Policy(NOW))
    assert isinstance(decision, Placement)
    assert decision.device == "cpu"


def test_without_any_device_there_is_a_reason() -> None:
    decision = plan(Request("new", ()), machine(cpu=1000), [], Policy(NOW))
    assert isinstance(decision, Refusal)
    assert (decision.result, decision.waits_for) == (Result.CANT_ACCOMMODATE, ())
    assert "lost" in decision.reason


def layered(
    over: tuple[str, ...] = ("gpu-0",), *, count: int = 4, weights: int = 100, kv: int = 200, **settings: int | str
) -> Spread:
    """Layers of 100 + 200 bytes and a head of 100; nothing else needs anything."""
    parameters = Parameters(**{"context_length": 1024, "parallel": 1, "gpu_layers": -1 if over else 0} | settings)  # type: ignore[arg-type]
    return Spread(Layers(parameters, (Sizes(weights, kv),) * count, 100, 0, 0, 0), over, {})


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
        (layered((), parallel=4), (0, 800), {"parallel": 1}),
        (layered((), kv=0), (0, 100), {}),
    ],
)
def test_the_nearest_fix_keeps_most(spread: Spread, rooms: tuple[int, int], fix: dict[str, object]) -> None:
    ledger = machine(gpu_0=rooms[0], cpu=rooms[1])
    decision = plan(ask(alone(spread), spread=spread), ledger, [], Policy(NOW))
    assert isinstance(decision, Refusal)
    assert decision.fix == fix


def test_a_model_too_large_for_one_device_is_divided_by_layer() -> None:
    """On as few devices as can be, evenly full, and to be measured before anything is booked."""
    spread = layered(("gpu-0", "gpu-1", "gpu-2"))
    ledger = machine(gpu_0=500, gpu_1=1000, gpu_2=700, cpu=100)
    decision = plan(ask(*(gpu(1300, name) for name in spread.over), spread=spread), ledger, [], Policy(NOW))
    assert isinstance(decision, Placement)
    assert (decision.result, decision.allocation) == (Result.FREE, Allocation.SPLIT)
    assert dict(zip(decision.devices, decision.tensor_split, strict=True)) == {"gpu-1": 3.0, "gpu-2": 2.0}
    assert decision.need == {"gpu-1": 900, "gpu-2": 400, "cpu": 0}
    assert not decision.measured


def test_a_measured_division_is_used_as_it_is() -> None:
    spread = layered(("gpu-0", "gpu-1"))
    measured = Option("gpu-0", {"gpu-0": 650, "gpu-1": 680, "cpu": 0}, layers={"gpu-0": 2, "gpu-1": 3})
    ledger = machine(gpu_0=1000, gpu_1=1000, cpu=100)
    request = ask(gpu(1300), gpu(1300, "gpu-1"), measured, spread=spread)
    decision = plan(request, ledger, [], Policy(NOW))
    assert isinstance(decision, Placement)
    assert decision.measured
    assert (decision.need, decision.tensor_split) == (measured.need, (2.0, 3.0))


def test_a_division_over_free_devices_comes_before_evictions() -> None:
    spread = layered(("gpu-0", "gpu-1"))
    ledger, idle = hold(machine(gpu_0=1400, gpu_1=700, cpu=100), "idle", {"gpu-0": 500})
    decision = plan(ask(gpu(1300), gpu(1300, "gpu-1"), spread=spread), ledger, [idle], Policy(NOW))
    assert isinstance(decision, Placement)
    assert (decision.result, decision.evict) == (Result.FREE, ())


def test_room_for_a_division_is_made_by_the_cheapest() -> None:
    spread = layered(("gpu-0", "gpu-1"))
    ledger, dear = hold(machine(gpu_0=1000, gpu_1=1000, cpu=100), "dear", {"gpu-0": 900}, reload_seconds=60.0)
    ledger, cheap = hold(ledger, "cheap", {"gpu-1": 600})
    ledger, small = hold(ledger, "small", {"gpu-1": 300})
    request = ask(gpu(1900), gpu(1900, "gpu-1"), spread=layered(("gpu-0", "gpu-1"), count=3, kv=0))
    decision = plan(request, ledger, [dear, cheap, small], Policy(NOW))
    assert isinstance(decision, Placement)
    assert (decision.result, decision.evict) == (Result.FULL, ("small",))
    everybody = plan(ask(gpu(1300), spread=spread), ledger, [dear, cheap, small], Policy(NOW))
    assert isinstance(everybody, Placement)
    assert set(everybody.evict) == {"dear", "small"}


@pytest.mark.parametrize(
    ("reload_seconds", "evicted", "devices"), [(1.5, "small", {"gpu-0", "gpu-1"}), (1.6, "big", {"gpu-0"})]
)
def test_one_device_is_preferred_unless_its_evictions_are_dearer_by_more_than_a_tenth(
    reload_seconds: float, evicted: str, devices: set[str]
) -> None:
    """With 600 bytes x 1 s gone it fits on one device, with 350 bytes x 1.5 or 1.6 s on two."""
    spread = layered(("gpu-0", "gpu-1"), count=7, kv=0)
    ledger, big = hold(machine(gpu_0=1000, gpu_1=700, cpu=100), "big", {"gpu-0": 600}, last_used_at=NOW)
    more = {"last_used_at": NOW, "reload_seconds": reload_seconds}
    ledger, small = hold(ledger, "small", {"gpu-1": 350}, **more)
    decision = plan(ask(gpu(800), gpu(800, "gpu-1"), spread=spread), ledger, [big, small], Policy(NOW))
    assert isinstance(decision, Placement)
    assert (decision.result, decision.evict, set(decision.devices)) == (Result.FULL, (evicted,), devices)


def test_leavers_and_busy_models_are_waited_for_by_a_division_too() -> None:
    spread = layered(("gpu-0", "gpu-1"))
    for standing in (Standing.LEAVING, Standing.BUSY):
        ledger, held = hold(machine(gpu_0=700, gpu_1=700, cpu=100), "other", {"gpu-0": 700}, standing)
        decision = plan(ask(gpu(1300), gpu(1300, "gpu-1"), spread=spread), ledger, [held], Policy(NOW))
        assert isinstance(decision, Refusal)
        assert decision.waits_for == ("other",)


def test_a_division_keeps_to_every_limit() -> None:
    """Dedicated devices, places, the memory limit and host memory bind it as they bind a model on one device."""
    spread = layered(("gpu-0", "gpu-1"))
    request = ask(gpu(1300), gpu(1300, "gpu-1"), spread=spread)
    base = machine(gpu_0=700, gpu_1=700, cpu=100)
    ledger, held = hold(base, "owner", {"gpu-0": 1}, Standing.FIXED, dedicated=True)
    assert isinstance(plan(request, ledger, [held], Policy(NOW)), Refusal)
    ledger, held = hold(base, "idle", {"gpu-0": 1, "cpu": 10})
    for policy in (Policy(NOW, max_models=1), Policy(NOW, max_models_per_device=1)):
        decision = plan(request, ledger, [held], policy)
        assert isinstance(decision, Placement)
        assert decision.evict == ("idle",)
    limited = replace(ledger, limit_bytes=1305)
    decision = plan(request, limited, [held], Policy(NOW))
    assert isinstance(decision, Placement)
    assert decision.evict == ("idle",)
    hosted = replace(spread, overhead={"cpu": 95})
    decision = plan(replace(request, spread=hosted), ledger, [held], Policy(NOW))
    assert isinstance(decision, Placement)
    assert decision.evict == ("idle",)
    refusal = plan(replace(request, spread=replace(spread, overhead={"cpu": 101})), ledger, [held], Policy(NOW))
    assert isinstance(refusal, Refusal)


def test_no_setting_helps_where_no_model_may_be_added() -> None:
    ledger, held = hold(machine(gpu_0=900, cpu=0), "pinned", {"gpu-0": 100}, Standing.FIXED)
    spread = layered(parallel=4)
    for most, has_fix in ((2, True), (1, False)):
        decision = plan(ask(alone(spread), spread=spread), ledger, [held], Policy(NOW, max_models=most))
        assert isinstance(decision, Refusal)
        assert decision.lacks
        assert bool(decision.fix) is has_fix


def test_models_beside_the_devices_that_may_be_used_are_no_help() -> None:
    """A victim of a division is one that gives something on its devices, or on the host."""
    spread = layered(("gpu-0", "gpu-1"))
    ledger, away = hold(machine(gpu_0=700, gpu_1=700, gpu_2=500, cpu=100), "away", {"gpu-2": 1, "cpu": 10})
    ledger, idle = hold(ledger, "idle", {"gpu-0": 600})
    request = ask(gpu(1300), gpu(1300, "gpu-1"), spread=spread)
    decision = plan(request, ledger, [away, idle], Policy(NOW))
    assert isinstance(decision, Placement)
    assert decision.evict == ("idle",)


def test_a_placement_on_one_device_names_it() -> None:
    assert Placement(Result.FREE, Allocation.FRACTIONAL, "gpu-0", {}).devices == ("gpu-0",)


def test_a_dedicated_model_may_have_several_devices_whole() -> None:
    spread = layered(("gpu-0", "gpu-1", "gpu-2"))
    ledger, held = hold(machine(gpu_0=700, gpu_1=700, gpu_2=700, cpu=100), "other", {"gpu-0": 1}, Standing.BUSY)
    request = ask(*(gpu(1300, name) for name in spread.over), dedicated=True, spread=spread)
    decision = plan(request, ledger, [held], Policy(NOW))
    assert isinstance(decision, Placement)
    assert decision.allocation is Allocation.WHOLE
    assert set(decision.devices) == {"gpu-1", "gpu-2"}


def test_a_pinned_model_or_one_layer_is_not_divided() -> None:
    for spread in (
        layered(("gpu-0",)),
        layered(("gpu-0", "gpu-1"), gpu_layers=1),
        replace(layered(("gpu-0", "gpu-1")), divide=False),
    ):
        decision = plan(ask(gpu(1300), spread=spread), machine(gpu_0=700, gpu_1=700, cpu=9000), [], Policy(NOW))
        assert isinstance(decision, Refusal)


def test_many_devices_take_the_layers_roomiest_first() -> None:
    names = tuple(f"gpu-{number}" for number in range(6))
    spread = layered(names, count=11, kv=0)
    ledger = machine(**{name.replace("-", "_"): 200 + number for number, name in enumerate(names)}, cpu=10)
    decision = plan(ask(gpu(1200), spread=spread), ledger, [], Policy(NOW))
    assert isinstance(decision, Placement)
    assert len(decision.devices) == 6
    assert sum(decision.tensor_split) == 12
    smaller = machine(**{name.replace("-", "_"): 199 for name in names}, cpu=10)
    refusal = plan(ask(gpu(1200), spread=spread), smaller, [], Policy(NOW))
    assert isinstance(refusal, Refusal)
    assert "nor divided over" in refusal.reason


def test_whether_a_model_can_be_placed_is_told_without_choosing_who_leaves() -> None:
    ledger, held = hold(machine(gpu_0=1000), "old", {"gpu-0": 900})
    scene = Scene.of(ledger, [held])
    assert prospect(ask(gpu(500)), scene, Policy(NOW)) is None
    refusal = prospect(ask(gpu(1500)), scene, Policy(NOW))
    assert refusal is not None
    assert refusal.result is Result.CANT_ACCOMMODATE
