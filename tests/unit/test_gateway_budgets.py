"""Budgets of keys by calendar month."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gateway.access.budgets import NO_BUDGET, Budget, Budgets, Spent, month_of, seconds_to_next_month

NOW = datetime(2026, 11, 30, 23, 59, 0, tzinfo=UTC).timestamp()


def test_budget_is_used_up_by_dollars_or_tokens_and_begins_again_with_the_month() -> None:
    budgets = Budgets("2026-11", {"ann": Spent(1.5, 10)})
    assert budgets.check("ann", Budget(dollars=2.0), NOW) is None
    budgets.note("ann", 0.5, 90, NOW)
    exceeded = budgets.check("ann", Budget(dollars=2.0), NOW)
    assert exceeded is not None
    assert exceeded.seconds == 60
    assert "$2.00 of $2.00 in 2026-11" in exceeded.message
    by_tokens = budgets.check("ann", Budget(tokens=100), NOW)
    assert by_tokens is not None
    assert "100 of 100 tokens" in by_tokens.message
    assert budgets.check("bob", Budget(dollars=2.0, tokens=100), NOW) is None
    assert budgets.check("bob", Budget(dollars=2.0), NOW, elsewhere=Spent(2.0)) is not None
    assert budgets.check("ann", Budget(dollars=2.0), NOW + 60) is None
    budgets.note("bob", 1.0, 1, NOW + 60)
    assert budgets.spent("ann", NOW + 60) == Spent()
    assert budgets.spent("bob", NOW + 60) == Spent(1.0, 1)
    budgets.note("bob", 5.0, 5, NOW)  # a request that began before the end of the month
    assert budgets.spent("bob", NOW + 60) == Spent(1.0, 1)


def test_key_without_a_budget_is_not_limited() -> None:
    assert not NO_BUDGET.is_any
    assert Budget(tokens=1).is_any
    assert Budgets().check("ann", NO_BUDGET, NOW) is None


@pytest.mark.parametrize(("month", "days"), [(1, 31), (2, 28), (11, 30), (12, 31)])
def test_month_ends_at_the_first_of_the_next_one(month: int, days: int) -> None:
    begin = datetime(2026, month, 1, tzinfo=UTC).timestamp()
    assert month_of(begin) == f"2026-{month:02}"
    assert seconds_to_next_month(begin) == days * 86400
