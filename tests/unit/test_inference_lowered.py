"""Models that leave after limits were lowered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.authority.placement.ledger import Account, Ledger, Phase
from inference.authority.placement.stage import Held, Policy, Standing
from inference.authority.pressure.lowered_limits import Limits, surplus

NOW = 100.0
KINDS = (Standing.WARM, Standing.IDLE, Standing.YOUNG, Standing.BUSY, Standing.FIXED)


def books(*models: tuple[str, Standing, dict[str, int]], limit: int | None = None) -> tuple[Limits, list[Held]]:
    """Two devices and a host of 1,000 bytes each, and the holdings of models."""
    ledger = Ledger(limit_bytes=limit)
    for device in ("gpu-0", "gpu-1", "cpu"):
        ledger = ledger.open(Account(device, 1000, 1000))
    held = []
    for name, standing, need in models:
        ledger = ledger.reserve(name, name, need).commit(name, need)
        if standing is Standing.WARM:
            ledger = ledger.put_aside(name)
        if standing is Standing.LEAVING:
            ledger = ledger.leave(name)
        held.append(Held(name, name, standing, need, NOW - 10, 1.0))
    return Limits(ledger, Policy(NOW)), held


def lowered(before: Limits, *accounts: Account, limit: int | None = None, policy: Policy | None = None) -> Limits:
    """Other limits for the same holdings."""
    ledger = before.ledger
    for account in accounts:
        ledger = ledger.open(account)
    return Limits(replace(ledger, limit_bytes=limit or ledger.limit_bytes), policy or before.policy)


def names(before: Limits, now: Limits, held: list[Held]) -> list[str]:
    return sorted(item.model for item in surplus(before, now, held).leavers)


def test_models_stay_while_no_limit_is_lowered() -> None:
    """Use above an unchanged or raised limit, and new devices, are handled elsewhere."""
    before, held = books(("a", Standing.IDLE, {"gpu-0": 600}), limit=1000)
    over = Limits(before.ledger.observe("gpu-0", 1500, 0), before.policy)
    assert surplus(over, over, held).leavers == ()
    assert names(over, lowered(over, Account("gpu-0", 1100, 1100), limit=1100), held) == []
    fresh = Limits(Ledger().open(Account("cpu", 1000, 1000)), before.policy)
    assert names(fresh, lowered(before, limit=None), held) == []


def test_idle_models_leave_before_busy_ones_and_pinned_ones_last() -> None:
    sizes = {kind: 20 * (place + 1) for place, kind in enumerate(KINDS)}
    before, held = books(*((str(kind), kind, {"cpu": size}) for kind, size in reversed(sizes.items())))
    gone: list[Standing] = []
    for kind in KINDS:
        gone.append(kind)
        left = sum(size for other, size in sizes.items() if other not in gone)
        assert names(before, lowered(before, Account("cpu", 1000, left)), held) == sorted(map(str, gone))


def test_limit_on_loaded_models_does_not_affect_warm_ones() -> None:
    before, held = books(("a", Standing.IDLE, {"gpu-0": 400}), ("b", Standing.WARM, {"cpu": 300}))
    found = surplus(before, lowered(before, limit=500), held)
    assert (found.leavers, found.reasons) == ((), ())
    found = surplus(before, lowered(before, limit=399), held)
    assert [item.model for item in found.leavers] == ["a"]
    assert found.reasons == ("loaded models hold 1 B more than INFERENCE_MEMORY_LIMIT_GB from now on",)


def test_leaving_model_counts_as_gone() -> None:
    before, held = books(("a", Standing.LEAVING, {"gpu-0": 400}), ("b", Standing.IDLE, {"gpu-0": 400}))
    assert names(before, lowered(before, Account("gpu-0", 1000, 400)), held) == []


def test_limits_on_the_number_of_models() -> None:
    """In total and per device; a warm model is not loaded."""
    before, held = books(
        ("a", Standing.IDLE, {"gpu-0": 10}),
        ("b", Standing.IDLE, {"gpu-0": 400}),
        ("c", Standing.BUSY, {"gpu-1": 10}),
        ("d", Standing.WARM, {"cpu": 1}),
    )
    assert names(before, lowered(before, policy=Policy(NOW, max_models=2)), held) == ["a"]
    assert names(before, lowered(before, policy=Policy(NOW, max_models=3)), held) == []
    assert names(before, lowered(before, policy=Policy(NOW, max_models_per_device=1)), held) == ["a"]


def test_foreign_use_reduces_a_lowered_device_limit() -> None:
    """Foreign use is 300: of a limit of 600 models may use 300, and of 200 nothing."""
    before, held = books(("a", Standing.IDLE, {"gpu-0": 100}), ("b", Standing.BUSY, {"gpu-0": 300}))
    before = Limits(before.ledger.observe("gpu-0", 700, 300), before.policy)
    assert names(before, lowered(before, Account("gpu-0", 600, 600)), held) == ["a"]
    assert names(before, lowered(before, Account("gpu-0", 200, 200)), held) == ["a", "b"]


models = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 80), st.integers(0, 80), st.integers(0, 80)), max_size=8
)


@given(models, st.integers(0, 300), st.integers(0, 300), st.integers(1, 600))
def test_lowered_limits_hold_without_needless_evictions(
    drawn: list[tuple[Standing, int, int, int]], on_gpu: int, on_host: int, limit: int
) -> None:
    """All lowered limits hold afterwards, and would not hold with any one of the leaving models."""
    described = [
        (f"m{at}", kind, {"cpu": host} if kind is Standing.WARM else {"gpu-0": gpu, "gpu-1": other, "cpu": host})
        for at, (kind, gpu, other, host) in enumerate(drawn)
    ]
    before, held = books(*described)
    now = lowered(before, Account("gpu-0", 1000, on_gpu), Account("cpu", 1000, on_host), limit=limit)
    gone = [item.holding for item in surplus(before, now, held).leavers]

    def holds(without: list[str]) -> bool:
        after = now.ledger.without(without)
        return not after.excess("gpu-0") and not after.excess("cpu") and after.loaded_bytes <= limit

    assert holds(gone)
    assert all(not holds([other for other in gone if other != name]) for name in gone)


def test_memory_aside_counts_on_its_device_and_not_for_the_limit() -> None:
    ledger = Ledger(limit_bytes=100).open(Account("cpu", 1000, 500)).reserve("a", "a", {"cpu": 100})
    assert ledger.lacks({"cpu": 1})
    aside = ledger.put_aside("a")
    assert (aside.loaded_bytes, aside.balance("cpu").ours_bytes, aside.lacks({"cpu": 100})) == (0, 100, ())
    both = aside.reserve("b", "b", {"cpu": 400}, aside=True)
    assert both.holdings["b"].aside
    assert both.commit("b", {"cpu": 300}).leave("b").holdings["b"].phase is Phase.RELEASING
    assert both.lacks({"cpu": 1}, aside=True)
    back = aside.reserve("c", "c", {"cpu": 60}).put_aside("a", aside=False)
    assert (back.loaded_bytes, back.spare_altogether) == (160, -60)


@pytest.mark.parametrize("aside", [True, False])
def test_growth_of_memory_aside_is_bounded_by_the_device_only(aside: bool) -> None:
    ledger = Ledger(limit_bytes=100).open(Account("cpu", 1000, 500)).reserve("a", "a", {"cpu": 90}, aside=aside)
    assert bool(ledger.lacks({"cpu": 20}, aside=aside)) is not aside
