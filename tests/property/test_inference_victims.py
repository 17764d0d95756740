"""The set of evicted models has the lowest cost on small instances, and is always sufficient and needed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.authority.placement import victims
from inference.authority.placement.ledger import Account, Ledger

costs = st.integers(0, 50).map(float)


@st.composite
def problems(draw: st.DrawFn, most: int) -> tuple[list[float], list[list[int]], list[int]]:
    resources = draw(st.integers(1, 3))
    missing = draw(st.lists(st.integers(-5, 60), min_size=resources, max_size=resources))
    items = draw(
        st.lists(
            st.tuples(costs, st.lists(st.integers(0, 20), min_size=resources, max_size=resources)),
            max_size=most,
        )
    )
    return [cost for cost, _ in items], [gives for _, gives in items], missing


def enough(chosen: tuple[int, ...], gives: list[list[int]], missing: list[int]) -> bool:
    return all(sum(gives[i][k] for i in chosen) >= need for k, need in enumerate(missing) if need > 0)


@pytest.mark.unmeasured
@given(problems(7))
@settings(max_examples=300, deadline=None)
def test_small_instances_equal_brute_force(
    problem: tuple[list[float], list[list[int]], list[int]],
) -> None:
    item_costs, gives, missing = problem
    every = itertools.chain.from_iterable(
        itertools.combinations(range(len(item_costs)), size) for size in range(len(item_costs) + 1)
    )
    fitting = [chosen for chosen in every if enough(chosen, gives, missing)]
    found = victims.cheapest(item_costs, gives, missing)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert enough(found, gives, missing)
    rank = min((sum(item_costs[i] for i in chosen), len(chosen)) for chosen in fitting)
    assert (sum(item_costs[i] for i in found), len(found)) == rank


@given(problems(40))
@settings(max_examples=100, deadline=None)
def test_large_instances_have_no_needless_eviction(
    problem: tuple[list[float], list[list[int]], list[int]],
) -> None:
    item_costs, gives, missing = problem
    found = victims.cheapest(item_costs, gives, missing)
    assert (found is None) == (not enough(tuple(range(len(gives))), gives, missing))
    for spared in found or ():
        assert not enough(tuple(i for i in found or () if i != spared), gives, missing)


class Pile:
    """Items with amounts of several resources, some of them gone."""

    def __init__(self, gives: list[list[int]], missing: list[int]) -> None:
        self.gives, self.missing = gives, missing
        self.gone: tuple[int, ...] = ()

    def set_removed(self, chosen: Collection[int]) -> None:
        self.gone = tuple(chosen)

    def suffices(self) -> bool:
        return enough(self.gone, self.gives, self.missing)


@given(problems(12))
@settings(max_examples=300, deadline=None)
def test_search_with_a_predicate_is_exact_for_few_models_and_evicts_none_without_need(
    problem: tuple[list[float], list[list[int]], list[int]],
) -> None:
    item_costs, gives, missing = problem
    found = victims.cheapest_where(item_costs, [sum(gift) for gift in gives], Pile(gives, missing))
    exact = victims.cheapest(item_costs, gives, missing)
    assert (found is None) == (exact is None)
    if found is None or exact is None:
        return
    assert enough(found, gives, missing)
    assert not any(enough(tuple(i for i in found if i != spared), gives, missing) for spared in found)
    if len(item_costs) <= 8:
        assert sum(item_costs[i] for i in found) == sum(item_costs[i] for i in exact)


@pytest.mark.unmeasured
@given(problems(9))
@settings(max_examples=200, deadline=None)
def test_fractional_solution_is_a_lower_bound(
    problem: tuple[list[float], list[list[int]], list[int]],
) -> None:
    item_costs, gives, missing = problem
    found = victims.cheapest(item_costs, gives, missing)
    least = victims.least_cost(item_costs, gives, missing)
    if found is None:
        return
    cost = sum(item_costs[i] for i in found)
    assert least <= cost + 1e-6
    assert victims.cheapest(item_costs, gives, missing, below=cost) == found
    assert cost == 0 or victims.cheapest(item_costs, gives, missing, below=cost * 0.9) is None


def test_impossible_need_has_infinite_cost() -> None:
    assert victims.least_cost([1.0], [[5]], [6]) == math.inf


amounts = st.integers(0, 300)


@given(
    st.lists(st.tuples(amounts, amounts), max_size=5),
    st.integers(0, 700),
    st.integers(0, 900) | st.none(),
    st.integers(100, 1200) | st.none(),
    st.dictionaries(st.sampled_from(["gpu-0", "cpu"]), st.integers(0, 1000), min_size=1),
    st.sets(st.integers(0, 4)),
)
@settings(max_examples=300, deadline=None)
def test_missing_amounts_are_those_of_the_ledger(
    held: list[tuple[int, int]],
    foreign: int,
    seen_free: int | None,
    limit: int | None,
    need: dict[str, int],
    leave: set[int],
) -> None:
    """A set releases every missing amount exactly when nothing is missing without it."""
    ledger = Ledger(limit_bytes=limit)
    for device in ("gpu-0", "cpu"):
        ledger = ledger.open(Account(device, 1000, 900, foreign, seen_free))
    kept = []
    for number, (gpu, cpu) in enumerate(held):
        amount = {"gpu-0": gpu, "cpu": cpu}
        if not ledger.lacks(amount):
            ledger = ledger.reserve(str(number), "m", amount).commit(str(number), amount)
            kept.append(number)
    per_device, altogether = ledger.missing(need)
    gone = [number for number in kept if number in leave]
    reached = all(
        sum(held[number][("gpu-0", "cpu").index(device)] for number in gone) >= count
        for device, count in per_device.items()
    ) and (sum(sum(held[number]) for number in gone) >= altogether)
    assert reached == (not ledger.without({str(number) for number in gone}).lacks(need))
