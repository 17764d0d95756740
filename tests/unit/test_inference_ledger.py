"""Bookings that the random walks over the ledger seldom meet; chosen, not random."""

from __future__ import annotations

import pytest

from inference.authority.placement.ledger import Account, Ledger, LedgerError


def test_a_holder_gives_back_what_it_had_and_not_what_it_had_not() -> None:
    ledger = Ledger().open(Account("gpu-0", 100, 100)).open(Account("cpu", 100, 100))
    ledger = ledger.reserve("a", "a", {"gpu-0": 60, "cpu": 10}).commit("a", {"gpu-0": 60, "cpu": 10})
    with pytest.raises(LedgerError, match="a cannot shrink to more than it holds"):
        ledger.shrink("a", {"cpu": 11})
    left = ledger.shrink("a", {"cpu": 10})
    assert (left.balance("gpu-0").resident_bytes, left.balance("cpu").resident_bytes) == (0, 10)


def test_a_part_becomes_one_with_the_whole() -> None:
    """Of the same owner, and never with itself."""
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
