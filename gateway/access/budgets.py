"""Budgets per key and calendar month (UTC): whether a key may start one more request."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

DAY_SECONDS = 86_400


class Budget(NamedTuple):
    """What a key may use in a month; None is no limit. `dollars` are US dollars, by the prices in force."""

    dollars: float | None = None
    tokens: int | None = None

    @property
    def is_any(self) -> bool:
        """Whether there is a limit."""
        return self != NO_BUDGET


NO_BUDGET = Budget()


class Spent(NamedTuple):
    """What a key used in a month: US dollars, and tokens of prompts and answers."""

    dollars: float = 0.0
    tokens: int = 0

    def plus(self, dollars: float, tokens: int) -> Spent:
        """With one more answer."""
        return Spent(self.dollars + dollars, self.tokens + tokens)


NOTHING = Spent()


@dataclass(frozen=True, slots=True)
class Exceeded:
    """Why a key must wait for the next month. `seconds` until then."""

    message: str
    seconds: float


def month_of(at: float) -> str:
    """The month of a Unix time, in UTC: 2026-11."""
    return _month_of_day(int(at // DAY_SECONDS))


@functools.lru_cache(maxsize=4)
def _month_of_day(day: int) -> str:
    """`day`: days since 1970. Cached, because each request needs the month twice, and formatting a date is slow."""
    return f"{datetime.fromtimestamp(day * DAY_SECONDS, UTC):%Y-%m}"


def seconds_to_next_month(now: float) -> float:
    """From a Unix time to the beginning of the next month, in UTC."""
    today = datetime.fromtimestamp(now, UTC)
    year, month = (today.year + 1, 1) if today.month == 12 else (today.year, today.month + 1)
    return datetime(year, month, 1, tzinfo=UTC).timestamp() - now


class Budgets:
    """What every key used in the current month. Running requests count when they end."""

    def __init__(self, month: str = "", spent: Mapping[str, Spent] | None = None) -> None:
        self._month = month
        self._spent = dict(spent or {})

    def spent(self, key: str, now: float) -> Spent:
        """What `key` used in the month of `now`."""
        return self._spent.get(key, Spent()) if month_of(now) == self._month else Spent()

    def note(self, key: str, dollars: float, tokens: int, now: float) -> None:
        """Adds one answer. One of an earlier month does not count for the current one."""
        if (month := month_of(now)) < self._month:
            return
        if month > self._month:
            self._month, self._spent = month, {}
        self._spent[key] = self._spent.get(key, Spent()).plus(dollars, tokens)

    def check(self, key: str, budget: Budget, now: float, elsewhere: Spent = NOTHING) -> Exceeded | None:
        """Why `key` must wait, if its budget is used up here and `elsewhere` together; else None."""
        spent = self.spent(key, now).plus(*elsewhere)
        if budget.dollars is not None and spent.dollars >= budget.dollars:
            used = f"${spent.dollars:.2f} of ${budget.dollars:.2f}"
        elif budget.tokens is not None and spent.tokens >= budget.tokens:
            used = f"{spent.tokens} of {budget.tokens} tokens"
        else:
            return None
        return Exceeded(
            f"the monthly budget of the key {key!r} is used up ({used} in {month_of(now)}); "
            "it begins again with the next month (UTC), or an administrator raises it",
            seconds_to_next_month(now),
        )
