"""Where models go: best fit, cheapest evictions, limits, dedicated devices, waits and fixes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from inference.core.fix import Scaling, nearest_fix
from inference.core.ledger import Account, Ledger
from inference.core.plan import Allocation, Held, Option, Placement, Policy, Refusal, Request, Result, Standing, plan

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


def ask(*options: Option, dedicated: bool = False, scaling: Scaling | None = None) -> Request:
    return Request("new", options, dedicated, scaling)


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


def scaled(parallel: int, kv: int = 800, kv_type: str = "f16", device: str = "cpu") -> Scaling:
    return Scaling(device, kv, 0, 1024, parallel, kv_type)


@pytest.mark.parametrize(
    ("scaling", "room", "fix"),
    [
        (scaled(4), 600, {"parallel": 1}),
        (scaled(4), 800, {"parallel": 2}),
        (scaled(1), 700, {"kv_type": "q8_0"}),
        (scaled(1), 450, {"kv_type": "q4_0"}),
        (scaled(1, kv_type="q8_0"), 700, {"context_length": 512}),
        (scaled(4), 330, {"parallel": 1, "context_length": 512}),
        (scaled(4), 200, {}),
        (scaled(4), 240, {}),
        (scaled(1), 300, {}),
        (Scaling("cpu", 100, 700, 1024, 1), 450, {}),
        (scaled(4, device="gpu-0"), 600, {}),
    ],
)
def test_the_nearest_fix_keeps_most(scaling: Scaling, room: int, fix: dict[str, object]) -> None:
    assert nearest_fix(scaling, {"cpu": 1000}, {"cpu": room}) == fix


def test_a_refusal_suggests_what_would_fit() -> None:
    decision = plan(ask(gpu(1000), scaling=scaled(4, device="gpu-0")), machine(gpu_0=800), [], Policy(NOW))
    assert isinstance(decision, Refusal)
    assert decision.fix == {"parallel": 2}
