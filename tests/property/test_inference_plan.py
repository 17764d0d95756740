"""A plan never overbooks, evicts no protected model, and evicts no model without need."""

from __future__ import annotations

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

DEVICES = ("gpu-0", "gpu-1")


@st.composite
def machines(draw: st.DrawFn) -> tuple[Ledger, list[Held]]:
    ledger = Ledger()
    for device in DEVICES:
        ledger = ledger.open(Account(device, 1000, 1000))
    held = []
    for number in range(draw(st.integers(0, 6))):
        device = draw(st.sampled_from(DEVICES))
        need = {device: draw(st.integers(1, 500))}
        if ledger.lacks(need):
            continue
        id = f"h{number}"
        ledger = ledger.reserve(id, f"m{number}", need).commit(id, need)
        held.append(
            Held(
                f"m{number}",
                id,
                draw(st.sampled_from([state for state in EvictionState if state is not EvictionState.WARM])),
                need,
                draw(st.floats(0, 100)),
                draw(st.floats(0.1, 60)),
            )
        )
    return ledger, held


@pytest.mark.unmeasured
@given(machines(), st.lists(st.integers(1, 1100), min_size=1, max_size=2), st.integers(1, 6) | st.none())
@settings(max_examples=200, deadline=None)
def test_plan_fits_and_evicts_only_idle_models_and_none_without_need(
    machine: tuple[Ledger, list[Held]], needs: list[int], most: int | None
) -> None:
    ledger, held = machine
    options = tuple(Option(device, {device: need}) for device, need in zip(DEVICES, needs, strict=False))
    policy = Policy(now=100.0, max_models=most)
    decision = plan(Request("new", options), ledger, held, policy)
    assert decision == plan(Request("new", options), ledger, held, policy), "the decision is deterministic"
    if isinstance(decision, Refusal):
        assert decision.trace
        assert set(decision.waits_for) <= {item.model for item in held}
        return
    by_name = {item.model: item for item in held}
    assert all(by_name[name].eviction_state is EvictionState.IDLE for name in decision.evict)
    assert (decision.result is Result.FULL) == bool(decision.evict)
    after = ledger
    for name in decision.evict:
        after = after.release(by_name[name].holding)
    after.reserve("new", "new", decision.need)
    assert most is None or len(held) - len(decision.evict) < most
    for spared in decision.evict:
        less = ledger
        for name in decision.evict:
            if name != spared:
                less = less.release(by_name[name].holding)
        count = len(held) - len(decision.evict) + 1
        needless = not less.lacks(decision.need) and (most is None or count < most)
        assert not needless, f"{spared} is evicted without need"


@given(machines(), st.integers(1, 900))
@settings(max_examples=100, deadline=None)
def test_model_with_a_final_refusal_does_not_fit_without_the_other_models(
    machine: tuple[Ledger, list[Held]], need: int
) -> None:
    """A refusal is final if it waits for no model. Then the model does not fit even after all others have left."""
    ledger, held = machine
    decision = plan(Request("new", (Option("gpu-0", {"gpu-0": need}),)), ledger, held, Policy(100.0))
    if isinstance(decision, Placement) or decision.waits_for:
        return
    for item in held:
        if item.eviction_state is not EvictionState.FIXED:
            ledger = ledger.release(item.holding)
    assert ledger.lacks({"gpu-0": need})
