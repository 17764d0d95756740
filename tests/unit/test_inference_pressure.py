"""Pressure levels: bounds, hysteresis, and admitted use."""

from __future__ import annotations

import pytest

from inference.authority.handlers.running.growth_watch import GROWTH_SLACK_BYTES, growth_bytes
from inference.authority.placement.ledger import Account, Ledger, LedgerError
from inference.authority.pressure.levels import Bounds, Gauge, Level, Use, admit, grew, settle

BOUNDS = Bounds()


def use(ours: int, foreign: int, total: int = 1000) -> Use:
    return Use("gpu-0", total, ours, foreign)


def settled(*uses: Use) -> Gauge:
    gauge = Gauge()
    for one in uses:
        gauge = settle(gauge, one, BOUNDS)
    return gauge


@pytest.mark.parametrize(
    ("foreign", "level"),
    [(0, "low"), (599, "low"), (600, "moderate"), (799, "moderate"), (800, "high"), (900, "critical"),
     (979, "critical"), (980, "emergency"), (1000, "emergency")],
)  # fmt: skip
def test_level_of_foreign_use(foreign: int, level: str) -> None:
    assert str(settled(use(0, foreign)).level) == level


def test_device_without_a_size_is_low() -> None:
    assert settled(use(100, 100, total=0)).level is Level.LOW


def test_plan_that_fills_its_budget_is_not_critical() -> None:
    assert settled(use(0, 20), use(975, 20)).level is Level.HIGH
    assert settled(use(0, 20), use(975, 20), use(975, 30)).level is Level.HIGH, "foreign use varies a little"


def test_foreign_growth_on_top_of_a_plan_is_critical() -> None:
    assert settled(use(0, 20), use(880, 20), use(880, 31)).level is Level.CRITICAL
    assert settled(use(0, 20), use(880, 20), use(880, 100)).level is Level.EMERGENCY


def test_foreign_growth_since_a_booking_is_not_admitted() -> None:
    booked = admit(settled(use(0, 20)), use(880, 20))
    assert settle(booked, use(880, 60), BOUNDS).level is Level.CRITICAL
    assert settled(use(0, 20), use(880, 60)).level is Level.HIGH, "the booking was not reported"


def test_plan_does_not_hide_critical_foreign_use() -> None:
    assert settled(use(0, 930), use(20, 930)).level is Level.CRITICAL


def test_plan_is_admitted_again_when_foreign_use_is_back() -> None:
    before = (use(0, 20), use(880, 20), use(880, 40))
    assert settled(*before, use(880, 29)).level is Level.CRITICAL
    assert settled(*before, use(880, 20)).level is Level.HIGH


def test_level_is_left_only_well_below_its_bound() -> None:
    assert settled(use(0, 800), use(0, 790)).level is Level.HIGH
    assert settled(use(0, 800), use(0, 779)).level is Level.MODERATE
    assert settled(use(0, 980), use(0, 100)).level is Level.LOW


def test_use_that_varies_around_a_bound_changes_the_level_once() -> None:
    gauge, levels = Gauge(), []
    for foreign in (795, 805, 795, 805, 790, 810):
        gauge = settle(gauge, use(0, foreign), BOUNDS)
        levels.append(gauge.level)
    assert levels == [Level.MODERATE, *[Level.HIGH] * 5]


def test_foreign_growth_accumulates_and_is_reported_once() -> None:
    gauge = Gauge()
    assert not grew(gauge, use(0, 500)), "there is nothing to compare with before the first reading"
    reported = []
    for foreign in (500, 506, 512, 512, 400, 409, 411):
        reported.append(grew(gauge, use(0, foreign)))
        gauge = settle(gauge, use(0, foreign), BOUNDS)
    assert reported == [False, False, True, False, False, False, True]


def test_own_growth_is_no_foreign_growth() -> None:
    assert not grew(settled(use(0, 100)), use(800, 100))


MIB = 2**20
HELD = 100 * MIB
SLACK = GROWTH_SLACK_BYTES + HELD // 10


def ledger(*, capacity: int = 1000, budget: int = 500, limit: int | None = None, seen: int = 0) -> Ledger:
    """One resident model of 100 MiB, and `seen` MiB of foreign use."""
    books = Ledger(limit_bytes=None if limit is None else limit * MIB)
    books = books.open(Account("cpu", capacity * MIB, budget * MIB)).reserve("a", "a", {"cpu": HELD})
    used = HELD + seen * MIB
    return books.commit("a", {"cpu": HELD}).observe("cpu", used, capacity * MIB - used)


@pytest.mark.parametrize("seen", [0, HELD, HELD + SLACK])
def test_growth_within_the_slack_is_ignored(seen: int) -> None:
    assert growth_bytes(ledger(), "a", "cpu", seen) == 0


def test_growth_that_fits_is_booked_to_its_model() -> None:
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
def test_growth_that_does_not_fit_names_the_limit(books: Ledger, bound: str) -> None:
    with pytest.raises(LedgerError, match=bound):
        books.grow("a", "cpu", growth_bytes(books, "a", "cpu", 700 * MIB))


def test_only_resident_models_grow() -> None:
    books = ledger().leave("a")
    with pytest.raises(LedgerError):
        books.grow("a", "cpu", 1)
