"""A device without its own memory is booked on the account that it shares, as if the need named that account."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.authority.placement.ledger import Account, Ledger, LedgerError
from inference.authority.placement.plan import EvictionState, Held, Option, Placement, Policy, Refusal, Request, plan

NAMES = ("metal", "cpu", "gpu-1")
needs = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 300), min_size=1)
steps = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "commit", "shrink", "grow", "leave", "release", "forfeit", "observe"]),
        st.integers(0, 3),
        needs,
    ),
    max_size=12,
)


def ledgers() -> tuple[Ledger, Ledger]:
    plain = Ledger(limit_bytes=1500)
    for device in ("cpu", "gpu-1"):
        plain = plain.open(Account(device, capacity_bytes=1000, budget_bytes=800))
    return plain.share("metal", "cpu"), plain


def named(need: dict[str, int]) -> dict[str, int]:
    """The same need by the names of the accounts."""
    found: dict[str, int] = {}
    for device, count in need.items():
        name = "cpu" if device == "metal" else device
        found[name] = found.get(name, 0) + count
    return found


def carry(ledger: Ledger, what: str, id: str, need: dict[str, int], device: str) -> Ledger:
    calls: dict[str, Callable[[], Ledger]] = {
        "reserve": lambda: ledger.reserve(id, "m", need),
        "commit": lambda: ledger.commit(id, need),
        "shrink": lambda: ledger.shrink(id, need),
        "grow": lambda: ledger.grow(id, device, need[device]),
        "leave": lambda: ledger.leave(id),
        "release": lambda: ledger.release(id),
        "forfeit": lambda: ledger.forfeit(id),
        "observe": lambda: ledger.observe(device, 3 * need[device], 1000 - 3 * need[device]),
    }
    try:
        return calls[what]()
    except LedgerError:
        return ledger


@given(steps)
def test_bytes_of_a_sharing_device_are_booked_on_its_account(events: list[tuple[str, int, dict[str, int]]]) -> None:
    """Balances, rooms and lacks are the same for both names."""
    sharing, plain = ledgers()
    for what, number, need in events:
        device = next(iter(need))
        here = "cpu" if device == "metal" else device
        one = {device: need[device]} if what in ("grow", "observe") else need
        sharing = carry(sharing, what, f"r{number}", one, device)
        plain = carry(plain, what, f"r{number}", named(one), here)
        assert sharing.balance("metal") == sharing.balance("cpu") == plain.balance("cpu")
        assert sharing.balance("gpu-1") == plain.balance("gpu-1")
        assert sharing.room("metal") == plain.room("cpu")
        assert sharing.spare("metal") == plain.spare("cpu")
        assert sharing.lacks(need) == plain.lacks(named(need))
        assert sharing.missing(need) == plain.missing(named(need))
        assert sharing.holdings == plain.holdings
        anew = Ledger(sharing.accounts, sharing.holdings, sharing.limit_bytes, shared=sharing.shared)
        assert anew.balance("metal") == sharing.balance("metal")


def test_only_a_device_without_an_own_account_can_share_one() -> None:
    sharing, plain = ledgers()
    assert sharing.share("metal", "cpu") is sharing
    assert (sharing.account_of("metal"), sharing.account_of("gpu-1")) == ("cpu", "gpu-1")
    for device, account in (("cpu", "gpu-1"), ("metal", "nowhere")):
        with pytest.raises(LedgerError, match="cannot share"):
            plain.share(device, account)


POLICY: dict[str, Any] = {"now": 100.0}


def test_model_on_the_cpu_is_evicted_for_one_on_an_accelerator_with_the_same_memory() -> None:
    ledger, _plain = ledgers()
    ledger = ledger.reserve("a", "old", {"cpu": 600}).commit("a", {"cpu": 600})
    held = [Held("old", "a", EvictionState.IDLE, ledger.holdings["a"].bytes, 0.0)]
    wish = Request("new", (Option("metal", {"metal": 500, "cpu": 100}),))
    decision = plan(wish, ledger, held, Policy(**POLICY))
    assert isinstance(decision, Placement)
    assert (decision.device, decision.evict) == ("metal", ("old",))
    alone = plan(wish, ledgers()[0], [], Policy(**POLICY))
    assert isinstance(alone, Placement)
    assert not alone.evict


def test_need_beyond_the_shared_memory_is_refused() -> None:
    """Each part alone would fit."""
    ledger, _plain = ledgers()
    decision = plan(Request("new", (Option("metal", {"metal": 500, "cpu": 400}),)), ledger, [], Policy(**POLICY))
    assert isinstance(decision, Refusal)
    assert [(lack.device, lack.need_bytes, lack.free_bytes) for lack in decision.lacks] == [("cpu", 900, 800)]


def test_limits_per_device_count_models_of_a_sharing_device() -> None:
    """A dedicated model has the memory for itself, whichever of its devices is named."""
    ledger, _plain = ledgers()
    ledger = ledger.reserve("a", "old", {"metal": 100}).commit("a", {"metal": 100})
    held = [Held("old", "a", EvictionState.IDLE, ledger.holdings["a"].bytes, 0.0)]
    option = Option("metal", {"metal": 100})
    for wish, policy in (
        (Request("new", (option,), dedicated=True), Policy(**POLICY)),
        (Request("new", (option,)), Policy(**POLICY, max_models_per_device=1)),
    ):
        decision = plan(wish, ledger, held, policy)
        assert isinstance(decision, Placement)
        assert decision.evict == ("old",)
