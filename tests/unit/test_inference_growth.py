"""A worker above its reservation: within the slack nothing follows, beyond it the growth is booked or it must leave."""

from __future__ import annotations

import pytest

from inference.authority.placement.ledger import Account, Ledger, LedgerError
from inference.authority.pressure.growth import SLACK_BYTES, Growth, growth

MIB = 2**20
HELD = 100 * MIB
SLACK = SLACK_BYTES + HELD // 10


def ledger(*, capacity: int = 1000, budget: int = 500, limit: int | None = None, seen: int = 0) -> Ledger:
    """One resident model of 100 MiB, on a device of which `seen` MiB more are in use by what looks foreign."""
    books = Ledger(limit_bytes=None if limit is None else limit * MIB)
    books = books.open(Account("cpu", capacity * MIB, budget * MIB)).reserve("a", "a", {"cpu": HELD})
    used = HELD + seen * MIB
    return books.commit("a", {"cpu": HELD}).observe("cpu", used, capacity * MIB - used)


@pytest.mark.parametrize("seen", [0, HELD, HELD + SLACK])
def test_within_the_slack_nothing_follows(seen: int) -> None:
    assert growth(ledger(), "a", "cpu", seen) is None


def test_growth_that_fits_moves_from_others_to_its_owner() -> None:
    found = growth(ledger(seen=200), "a", "cpu", 300 * MIB)
    assert found is not None
    assert found.ledger is not None
    balance = found.ledger.balance("cpu")
    assert (found.bytes, balance.resident_bytes, balance.foreign_bytes) == (200 * MIB, 300 * MIB, 0)
    assert growth(found.ledger, "a", "cpu", 300 * MIB) is None, "it is told once"


@pytest.mark.parametrize(
    ("books", "bound"),
    [
        (ledger(seen=600, budget=600), "the share of the device"),
        (ledger(seen=600, capacity=650, budget=2000), "the device"),
        (ledger(seen=600, budget=2000, limit=400), "the memory limit"),
    ],
)
def test_growth_that_does_not_fit_names_what_it_exceeds(books: Ledger, bound: str) -> None:
    found = growth(books, "a", "cpu", 700 * MIB)
    assert isinstance(found, Growth)
    assert found.ledger is None
    assert bound in found.reason


def test_only_what_is_resident_grows() -> None:
    books = ledger().leave("a")
    with pytest.raises(LedgerError):
        books.grow("a", "cpu", 1)
