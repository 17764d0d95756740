"""Warm models in the plan: they leave before loaded ones, and count for no limit on the number of models."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference.authority.placement.ledger import Account, Ledger
from inference.authority.placement.plan import EvictionState, Held, Option, Placement, Policy, Request, Result, plan

GIB = 2**30

loaded = st.tuples(st.integers(1, 6), st.integers(0, 3), st.just(EvictionState.IDLE))
warm = st.tuples(st.just(0), st.integers(1, 6), st.just(EvictionState.WARM))


def scene(models: list[tuple[int, int, EvictionState]]) -> tuple[Ledger, list[Held]]:
    """All models booked on a GPU of 24 GiB and a host of 24 GiB."""
    ledger = Ledger().open(Account("gpu-0", 24 * GIB, 24 * GIB)).open(Account("cpu", 24 * GIB, 24 * GIB))
    held = []
    for number, (gpu, host, eviction_state) in enumerate(models):
        need = {"cpu": host * GIB} | ({"gpu-0": gpu * GIB} if gpu else {})
        if ledger.lacks(need):
            continue
        ledger = ledger.reserve(f"h{number}", f"m{number}", need).commit(f"h{number}", need)
        held.append(Held(f"m{number}", f"h{number}", eviction_state, need, float(number), 1.0 + number))
    return ledger, held


@given(st.lists(loaded | warm, max_size=7), st.integers(1, 24), st.integers(0, 24))
def test_loaded_models_are_not_evicted_for_memory_of_warm_ones(
    models: list[tuple[int, int, EvictionState]], gpu: int, host: int
) -> None:
    """If it fits without warm models, only warm models leave, and none without need."""
    ledger, held = scene(models)
    need = {"gpu-0": gpu * GIB, "cpu": host * GIB}
    decision = plan(Request("new", (Option("gpu-0", need),)), ledger, held, Policy(100.0))
    warm_ones = {item.model: item.holding for item in held if item.eviction_state is EvictionState.WARM}
    if not isinstance(decision, Placement):
        assert ledger.without([item.holding for item in held]).lacks(need)
        return
    assert (decision.result is Result.FREE) == (not ledger.lacks(need))
    if not ledger.without(list(warm_ones.values())).lacks(need):
        assert set(decision.evict) <= set(warm_ones)
    gone = {item.holding for item in held if item.model in decision.evict}
    assert not ledger.without(gone).lacks(need)
    for name in decision.evict:
        kept = {item.holding for item in held if item.model in decision.evict and item.model != name}
        assert ledger.without(kept).lacks(need)


@given(st.lists(warm, max_size=5))
def test_warm_models_do_not_count_as_loaded(models: list[tuple[int, int, EvictionState]]) -> None:
    """The limits on the number of models count loaded models; a dedicated model tolerates warm ones."""
    ledger, held = scene(models)
    request = Request("new", (Option("cpu", {"cpu": 0}),), dedicated=True)
    decision = plan(request, ledger, held, Policy(1.0, max_models=1, max_models_per_device=1))
    assert isinstance(decision, Placement)
    assert decision.result is Result.FREE


def test_warm_model_is_placed_again_without_an_eviction() -> None:
    ledger, held = scene([(0, 4, EvictionState.WARM)])
    decision = plan(Request("m0", (Option("gpu-0", {"gpu-0": GIB}),)), ledger, held, Policy(1.0))
    assert decision.result is Result.FREE
