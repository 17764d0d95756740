"""Compared with brute force on small machines: the cheapest evictions, correct refusals, suggestions that work."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    plan,
)
from inference.authority.placement.smaller_settings import Fit, FitStep
from inference.authority.placement.spread import Spread
from inference.authority.placement.stage import EVICTABLE, Stage
from inference.estimate.header_formula import Parameters
from inference.estimate.layers import Layers, Sizes
from inference.settings import pool_problem

pytestmark = pytest.mark.unmeasured

NOW = 100.0
GPUS = ("gpu-0", "gpu-1", "gpu-2")
MAX_COST_RATIO = 1.10
ROUNDING = 1 + 1e-9


@st.composite
def machines(draw: st.DrawFn, gpus: int, *, crowded: bool = False) -> tuple[Ledger, list[Held]]:
    """Devices with foreign use, sometimes a limit, and some models in any eviction state on one or two devices.

    A `crowded` machine is small and full, mostly of idle models.
    """
    names = GPUS[:gpus]
    ledger = Ledger(limit_bytes=draw(st.none() | st.integers(1500 if crowded else 500, 4000)))
    for name in (*names, "cpu"):
        capacity = draw(st.integers(400, 600) if crowded else st.integers(300, 1200))
        ledger = ledger.open(Account(name, capacity, capacity, draw(st.integers(0, 50 if crowded else 200))))
    held: list[Held] = []
    for number in range(draw(st.integers(3, 7) if crowded else st.integers(0, 6))):
        some = st.integers(100, 350) if crowded else st.integers(1, 500)
        need = draw(st.dictionaries(st.sampled_from(names), some, min_size=1, max_size=2))
        need["cpu"] = draw(st.integers(0, 60))
        if ledger.lacks(need):
            continue
        id = f"m{number}"
        ledger = ledger.reserve(id, id, need).commit(id, need)
        eviction_state = draw(st.sampled_from([EvictionState.IDLE] * (30 if crowded else 3) + list(EvictionState)))
        if eviction_state is EvictionState.WARM:
            need = {"cpu": need["cpu"]}
            ledger = ledger.shrink(id, need).set_exempt(id)
        held.append(Held(id, id, eviction_state, need, draw(st.floats(0, 100)), draw(st.floats(0.1, 60))))
    return ledger, held


@st.composite
def spreads(draw: st.DrawFn, gpus: int, count: tuple[int, int] = (1, 5), weights: tuple[int, int] = (1, 200)) -> Spread:
    """A few layers of different sizes over all accelerators."""
    layers = draw(st.integers(*count))
    sizes = tuple(
        Sizes(of_layer, draw(st.integers(0, weights[1] // 2)), True, of_layer * draw(st.sampled_from((0, 0, 9))) // 10)
        for of_layer in (draw(st.integers(*weights)) for _ in range(layers))
    )
    parallel = draw(st.integers(1, 4))
    pool = draw(st.none() | st.integers(1024, 1024 * parallel))
    apart = draw(st.just(0) | st.integers(0, layers))
    parameters = Parameters(1024, parallel, pool, gpu_layers=-1, ubatch=1, host_expert_layers=apart)
    made = Layers(parameters, sizes, draw(st.integers(0, 100)), draw(st.integers(0, 30)), draw(st.integers(0, 40)), 5)
    overhead = {name: draw(st.integers(0, 60)) for name in (*GPUS[:gpus], "cpu")}
    return Spread(made, GPUS[:gpus], overhead)


def tight(gpus: int) -> st.SearchStrategy[Spread]:
    """On a crowded machine one device or several have room for such a model after an eviction."""
    return spreads(gpus, (3, 5), (40, 100))


def large(gpus: int) -> st.SearchStrategy[Spread]:
    """No device has room for all of its layers."""
    return spreads(gpus, (4, 6), (120, 200))


policies = st.builds(Policy, st.just(NOW), st.none() | st.integers(1, 6), st.none() | st.integers(1, 4))


def request_of(spread: Spread, *, dedicated: bool = False) -> Request:
    options = tuple(Option(name, spread.need({name: spread.layers.places})) for name in spread.over)
    return Request("new", options, dedicated, spread)


def divisions(spread: Spread) -> Iterable[dict[str, int]]:
    """All ways to give consecutive layers to some of the devices in some order."""
    places = spread.layers.places
    for count in range(1, len(spread.over) + 1):
        for order in itertools.permutations(spread.over, count):
            for cuts in itertools.combinations(range(1, places), count - 1):
                ends = (0, *cuts, places)
                yield {name: end - begin for name, begin, end in zip(order, ends, ends[1:], strict=False)}


def fits_at_all(request: Request, stage: Stage, policy: Policy, ways: Sequence[dict[str, int]]) -> bool:
    assert request.spread is not None
    return any(
        stage.obstacle(tuple(way), request.spread.need(way), policy, dedicated=request.dedicated) is None
        for way in ways
    )


def cheapest_by_force(
    request: Request, ledger: Ledger, held: list[Held], policy: Policy, ways: Sequence[dict[str, int]]
) -> float | None:
    """The lowest cost of evictions after which one of these ways is possible, or None."""
    movable = [item for item in held if item.eviction_state in EVICTABLE]
    found = None
    for size in range(len(movable) + 1):
        for gone in itertools.combinations(movable, size):
            cost = sum(item.cost(NOW) for item in gone)
            if found is not None and cost >= found:
                continue
            stage = Stage.of(ledger.without({item.holding for item in gone}), [x for x in held if x not in gone])
            if fits_at_all(request, stage, policy, ways):
                found = cost
    return found


def leaving_models_make_room(
    request: Request,
    refusal: Refusal,
    ledger: Ledger,
    held: list[Held],
    policy: Policy,
    ways: Sequence[dict[str, int]],
) -> bool:
    """Whether the refusal waits only for models that leave anyway, and the request fits without them."""
    evicted = [item for item in held if item.eviction_state is EvictionState.LEAVING]
    stage = Stage.of(ledger.without({item.holding for item in evicted}), [x for x in held if x not in evicted])
    return {*refusal.waits_for} == {item.model for item in evicted} and fits_at_all(request, stage, policy, ways)


def cost_of(decision: Placement, held: list[Held]) -> float:
    by_name = {item.model: item for item in held}
    return sum(by_name[name].cost(NOW) for name in decision.evict)


@given(machines(1), spreads(1), policies, st.booleans())
@settings(max_examples=120, deadline=None)
def test_plan_for_one_device_has_the_lowest_cost(
    machine: tuple[Ledger, list[Held]], spread: Spread, policy: Policy, dedicated: bool
) -> None:
    ledger, held = machine
    request = request_of(spread, dedicated=dedicated)
    decision = plan(request, ledger, held, policy)
    ways = list(divisions(spread))
    best = cheapest_by_force(request, ledger, held, policy, ways)
    if isinstance(decision, Placement):
        assert best is not None
        assert cost_of(decision, held) <= best * ROUNDING
    else:
        assert best is None or leaving_models_make_room(request, decision, ledger, held, policy, ways)


@given(
    machines(3) | machines(3, crowded=True),
    spreads(3) | tight(3) | large(3),
    policies | st.just(Policy(NOW)),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_plan_over_several_devices_is_within_a_tenth_of_the_lowest_cost(
    machine: tuple[Ledger, list[Held]], spread: Spread, policy: Policy, dedicated: bool
) -> None:
    """On one device or divided in any way. A refusal waits only for models that leave anyway."""
    ledger, held = machine
    request = request_of(spread, dedicated=dedicated)
    decision = plan(request, ledger, held, policy)
    ways = list(divisions(spread))
    best = cheapest_by_force(request, ledger, held, policy, ways)
    if isinstance(decision, Refusal):
        assert best is None or leaving_models_make_room(request, decision, ledger, held, policy, ways)
        return
    assert best is not None
    assert cost_of(decision, held) <= best * MAX_COST_RATIO * ROUNDING
    if decision.result is Result.FREE:
        assert not decision.evict


@given(machines(3), spreads(3), policies, st.booleans())
@settings(max_examples=80, deadline=None)
def test_plan_can_be_executed(
    machine: tuple[Ledger, list[Held]], spread: Spread, policy: Policy, dedicated: bool
) -> None:
    """No protected model is evicted; after the evictions the ledger accepts exactly the plan, layer by layer."""
    ledger, held = machine
    decision = plan(request_of(spread, dedicated=dedicated), ledger, held, policy)
    if isinstance(decision, Refusal):
        return
    by_name = {item.model: item for item in held}
    assert all(by_name[name].eviction_state in EVICTABLE for name in decision.evict)
    after = ledger
    for name in decision.evict:
        after = after.release(by_name[name].holding)
    booked = after.reserve("new", "new", decision.need)
    for device, count in decision.need.items():
        assert booked.balance(device).reserved_bytes == count
    if decision.tensor_split:
        counts = {name: int(count) for name, count in zip(decision.devices, decision.tensor_split, strict=True)}
        assert sum(counts.values()) == spread.layers.offloaded
        assert all(counts.values())
        assert decision.need == spread.need(counts)
    there = [item for item in held if item.model not in decision.evict and set(item.devices) & set(decision.devices)]
    assert not (dedicated and there)


@given(machines(3), spreads(3), policies, st.sets(st.sampled_from(FitStep)))
@settings(max_examples=80, deadline=None)
def test_final_refusal_is_correct_and_its_suggestion_works(
    machine: tuple[Ledger, list[Held]], spread: Spread, policy: Policy, steps: Collection[FitStep]
) -> None:
    """The model fits nowhere, even after all models that can leave have left. It fits with the suggested or allowed
    settings, but not with the experts of one layer less in host memory.
    """
    ledger, held = machine
    request = replace(request_of(spread), fit=Fit(steps, 512))
    decision = plan(request, ledger, held, policy)
    if isinstance(decision, Placement) or decision.waits_for:
        return
    fixed = [item for item in held if item.eviction_state is EvictionState.FIXED]
    ledger = ledger.without({item.holding for item in held if item not in fixed})
    assert not fits_at_all(request, Stage.of(ledger, fixed), policy, list(divisions(spread)))
    if decision.fix:
        smaller = changed(spread, decision.fix)
        parameters = smaller.layers.parameters
        assert pool_problem(parameters.kv_cells, parameters.context_length, parameters.parallel) is None
        options = tuple(Option(name, smaller.need({name: smaller.layers.offloaded})) for name in smaller.over)
        again = plan(replace(request, options=options, spread=smaller), ledger, fixed, policy)
        assert isinstance(again, Placement)
        if "experts" in decision.fix and "gpu_layers" not in decision.fix:
            fewer = changed(spread, {**decision.fix, "experts": decision.fix["experts"] - 1})
            assert not any(
                Stage.of(ledger, fixed).obstacle((*way,), fewer.need(way), policy, dedicated=False) is None
                for way in divisions(fewer)
            )


def changed(spread: Spread, fix: Mapping[str, Any]) -> Spread:
    """The model with these settings."""
    keys = {"experts": "host_expert_layers"}
    return replace(spread, layers=spread.layers.changed(**{keys.get(key, key): value for key, value in fix.items()}))
