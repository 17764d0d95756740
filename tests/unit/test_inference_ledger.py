"""The ledger: shrinking, absorbing and writing off holdings (tests/property has random operations)."""

from __future__ import annotations

import pytest

from inference.authority.placement.ledger import Account, Ledger, LedgerError


def test_holding_shrinks_to_a_part_of_itself_only() -> None:
    ledger = Ledger().open(Account("gpu-0", 100, 100)).open(Account("cpu", 100, 100))
    ledger = ledger.reserve("a", "a", {"gpu-0": 60, "cpu": 10}).commit("a", {"gpu-0": 60, "cpu": 10})
    with pytest.raises(LedgerError, match="a cannot shrink to more than it holds"):
        ledger.shrink("a", {"cpu": 11})
    left = ledger.shrink("a", {"cpu": 10})
    assert (left.balance("gpu-0").resident_bytes, left.balance("cpu").resident_bytes) == (0, 10)


def test_part_is_absorbed_by_the_holding_of_the_same_owner() -> None:
    ledger = Ledger().open(Account("gpu-0", 100, 100)).open(Account("cpu", 100, 100))
    for id, owner, need in (
        ("a", "a", {"gpu-0": 60}),
        ("a-part", "a", {"gpu-0": 5, "cpu": 10}),
        ("b", "b", {"cpu": 1}),
    ):
        ledger = ledger.reserve(id, owner, need).commit(id, need)
    whole = ledger.absorb("a", "a-part")
    assert dict(whole.holdings["a"].bytes) == {"gpu-0": 65, "cpu": 10}
    assert "a-part" not in whole.holdings
    for other in ("a", "b"):
        with pytest.raises(LedgerError, match=f"{other} cannot become a part of a"):
            ledger.absorb("a", other)


MIB = 2**20


def books() -> Ledger:
    ledger = Ledger(limit_bytes=5000 * MIB)
    for name in ("gpu-0", "gpu-1", "cpu"):
        ledger = ledger.open(Account(name, 1000 * MIB, 1000 * MIB))
    ledger = ledger.reserve("a#1", "a", {"gpu-0": 100 * MIB, "cpu": 10 * MIB})
    ledger = ledger.reserve("b#2", "b", {"gpu-0": 200 * MIB, "gpu-1": 300 * MIB}).leave("b#2")
    return ledger.observe("gpu-0", 700 * MIB, 300 * MIB)


def test_write_off_removes_all_bytes_on_the_lost_device() -> None:
    ledger = books().write_off("gpu-0")
    balance = ledger.balance("gpu-0")
    assert (balance.ours_bytes, balance.foreign_bytes, balance.free_bytes) == (0, 0, 1000 * MIB)
    assert ledger.balance("gpu-1").releasing_bytes == 300 * MIB
    assert ledger.balance("cpu").reserved_bytes == 10 * MIB
    assert ledger.owned_by("a") == {"cpu": 10 * MIB}
    assert ledger.write_off("gpu-0") == ledger


def test_rest_after_a_write_off_is_released_once() -> None:
    ledger = books().write_off("gpu-0").release("a#1").forfeit("b#2")
    assert not ledger.holdings
    assert ledger.balance("gpu-0").free_bytes == 1000 * MIB
    assert ledger.balance("gpu-1").foreign_bytes == 300 * MIB


def test_shared_host_memory_is_not_written_off() -> None:
    ledger = Ledger().open(Account("cpu", 1000, 1000)).share("gpu-0", "cpu").reserve("a#1", "a", {"gpu-0": 400})
    assert ledger.write_off("gpu-0") == ledger
