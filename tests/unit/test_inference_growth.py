"""A worker above its reservation: within the slack nothing follows, beyond it the growth is booked or it must leave."""

from __future__ import annotations

import pytest

from inference.authority.handlers.running.growth_watch import GROWTH_SLACK_BYTES, growth_bytes
from inference.authority.placement.ledger import Account, Ledger, LedgerError

MIB = 2**20
HELD = 100 * MIB
SLACK = GROWTH_SLACK_BYTES + HELD // 10


def ledger(*, capacity: int = 1000, budget: int = 500, limit: int | None = None, seen: int = 0) -> Ledger:
    """One resident model of 100 MiB, on a device of which `seen` MiB more are in use by what looks foreign."""
    books = Ledger(limit_bytes=None if limit is None else limit * MIB)
    books = books.open(Account("cpu", capacity * MIB, budget * MIB)).reserve("a", "a", {"cpu": HELD})
    used = HELD + seen * MIB
    return books.commit("a", {"cpu": HELD}).observe("cpu", used, capacity * MIB - used)


@pytest.mark.parametrize("seen", [0, HELD, HELD + SLACK])
def test_within_the_slack_nothing_follows(seen: int) -> None:
    assert growth_bytes(ledger(), "a", "cpu", seen) == 0


def test_growth_that_fits_moves_from_others_to_its_owner() -> None:
    more = growth_bytes(ledger(seen=200), "a", "cpu", 300 * MIB)
    grown = ledger(seen=200).grow("a", "cpu", more)
    balance = grown.balance("cpu")
    assert (more, balance.resident_bytes, balance.foreign_bytes) == (200 * MIB, 300 * MIB, 0)
    assert growth_bytes(grown, "a", "cpu", 300 * MIB) == 0, "it is reported once"


@pytest.mark.parametrize(
    ("books", "bound"),
    [
        (ledger(seen=600, budget=600), "the share of the device"),
        (ledger(seen=600, capacity=650, budget=2000), "the device"),
        (ledger(seen=600, budget=2000, limit=400), "the memory limit"),
    ],
)
def test_growth_that_does_not_fit_names_what_it_exceeds(books: Ledger, bound: str) -> None:
    with pytest.raises(LedgerError, match=bound):
        books.grow("a", "cpu", growth_bytes(books, "a", "cpu", 700 * MIB))


def test_only_what_is_resident_grows() -> None:
    books = ledger().leave("a")
    with pytest.raises(LedgerError):
        books.grow("a", "cpu", 1)
