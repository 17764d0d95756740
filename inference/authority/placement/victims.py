"""Finds the cheapest set of models that releases enough of every missing resource.

A covering problem: item i costs `costs[i]` and gives `gives[i][k]` of resource k. The search is depth-first branch and
bound: it prunes when the chosen items and the next cheapest cost more than the best answer, or when the fractional
relaxation does. It starts with greedy answers and stops after a bounded amount of work. The answer is the cheapest set
for up to nine items, and for most larger inputs. No answer contains a superfluous item.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

MAX_STEPS = 1024
MAX_LOOKS = 6_000
"""Limit of visited items when there are more than ten."""
MAX_QUESTIONS = 256
"""Steps of an exact search with a predicate over up to eight items."""
FEW_QUESTIONS = 32
"""Steps of such a search over more items."""
_EXACT_ITEMS = 8
_FEW = 10
_ROUNDING = 1 + 1e-9


def cheapest(
    costs: Sequence[float],
    gives: Sequence[Sequence[int]],
    missing: Sequence[int],
    below: float = math.inf,
    effort: float = 1.0,
) -> tuple[int, ...] | None:
    """Ascending indexes of the cheapest set (then the smallest) whose sums reach `missing`, or None.

    Costs and amounts are not negative. None also if every set costs more than `below`. `effort` is the share of the
    step limit for more than ten items.
    """
    wanted = [k for k, count in enumerate(missing) if count > 0]
    amounts = [[gift[k] for k in wanted] for gift in gives]
    useful = sorted((i for i, gift in enumerate(amounts) if any(gift)), key=lambda i: (costs[i], i))
    search = _Search(
        [costs[i] for i in useful], [amounts[i] for i in useful], [missing[k] for k in wanted], below, effort
    )
    found = search.run()
    return None if found is None else tuple(sorted(useful[at] for at in found))


class RemovalSet(Protocol):
    """A set of removed items, and whether it suffices."""

    def set_removed(self, chosen: Collection[int]) -> None:
        """Replaces the set of removed items."""
        ...

    def suffices(self) -> bool:
        """Must be monotonic: a superset of a sufficient set suffices."""
        ...


def cheapest_where(costs: Sequence[float], worth: Sequence[int], removals: RemovalSet) -> tuple[int, ...] | None:
    """Ascending indexes of a cheap sufficient set, or None if all items together do not suffice.

    `worth` is a rough figure of what each item gives. The result is the cheapest set (then the smallest) for up to
    eight items; for more, a set without superfluous items, after bounded work.
    """

    def enough(chosen: Collection[int]) -> bool:
        removals.set_removed(chosen)
        return removals.suffices()

    order = sorted(range(len(costs)), key=lambda i: (costs[i], i))
    if not enough(order):
        return None
    by_rate = sorted(order, key=lambda i: costs[i] / max(worth[i], 1))
    best = min((_spared(way, costs, enough) for way in (order, by_rate)), key=lambda found: _rank(found, costs))
    rank = _rank(best, costs)
    questions = MAX_QUESTIONS if len(costs) <= _EXACT_ITEMS else FEW_QUESTIONS
    waiting: list[tuple[int, list[int], float]] = [(0, [], 0.0)]
    while waiting and questions:
        at, chosen, cost = waiting.pop()
        if (cost, len(chosen)) >= rank:
            continue
        questions -= 1
        if enough(chosen):
            best, rank = chosen, (cost, len(chosen))
            continue
        for later in range(len(order) - 1, at - 1, -1):
            dearer = cost + costs[order[later]]
            if (dearer, len(chosen) + 1) < rank:
                waiting.append((later + 1, [*chosen, order[later]], dearer))
    return tuple(sorted(best))


def _rank(chosen: Sequence[int], costs: Sequence[float]) -> tuple[float, int]:
    return sum(costs[at] for at in chosen), len(chosen)


def _spared(order: Sequence[int], costs: Sequence[float], enough: Callable[[Collection[int]], bool]) -> list[int]:
    """The shortest sufficient prefix of `order`, without superfluous items (the most expensive are removed first)."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if enough(order[:middle]):
            high = middle
        else:
            low = middle + 1
    chosen = set(order[:high])
    for at in sorted(chosen, key=lambda i: (-costs[i], i)):
        if enough(chosen - {at}):
            chosen.remove(at)
    return sorted(chosen)


def least_cost(costs: Sequence[float], gives: Sequence[Sequence[int]], missing: Sequence[int]) -> float:
    """A lower bound of the cost: the fractional relaxation for the most expensive resource."""
    return max((_fractions(costs, gives, k, need, 0) for k, need in enumerate(missing) if need > 0), default=0.0)


def _fractions(costs: Sequence[float], gives: Sequence[Sequence[int]], k: int, need: float, at: int) -> float:
    """The least cost of `need` of resource `k` from divisible items at `at` and later."""
    rates = sorted((costs[i] / gives[i][k], i) for i in range(at, len(costs)) if gives[i][k])
    spent = 0.0
    for rate, i in rates:
        here = gives[i][k]
        if here >= need:
            return spent + rate * need
        spent += costs[i]
        need -= here
    return math.inf


class _Search:
    """One search; items are sorted by cost."""

    def __init__(
        self, costs: list[float], gives: list[list[int]], missing: list[int], below: float, effort: float
    ) -> None:
        self._costs = costs
        self._gives = gives
        self._missing = missing
        self._below = below
        self._best: tuple[float, int, list[int]] | None = None
        few = len(costs) <= _FEW
        self._steps = MAX_STEPS if few else max(1, int(effort * min(MAX_STEPS, MAX_LOOKS // len(costs))))
        later = [0] * len(missing)
        self._later = [later]
        for gift in reversed(gives):
            later = [have + more for have, more in zip(later, gift, strict=True)]
            self._later.append(later)
        self._later.reverse()
        self._by_rate = [
            sorted((cost / gift[k], i) for i, (cost, gift) in enumerate(zip(costs, gives, strict=True)) if gift[k])
            for k in range(len(missing))
        ]

    def run(self) -> list[int] | None:
        if any(have < need for have, need in zip(self._later[0], self._missing, strict=True)):
            return None
        self._keep(self._pruned(self._greedy(range(len(self._costs)))))
        for rates in self._by_rate:
            self._keep(self._pruned(self._greedy([i for _rate, i in rates])))
        self._descend(0, [], 0.0, self._missing)
        assert self._best is not None
        cost, _count, chosen = self._best
        return None if cost > self._below * _ROUNDING else self._pruned(chosen)

    def _greedy(self, order: Sequence[int]) -> list[int]:
        """Items in `order` until they suffice, then the cheapest of the rest if `order` is incomplete."""
        chosen: list[int] = []
        left = list(self._missing)
        taken = set(order)
        for at in (*order, *(i for i in range(len(self._costs)) if i not in taken)):
            if all(need <= 0 for need in left):
                break
            if any(gift > 0 and need > 0 for gift, need in zip(self._gives[at], left, strict=True)):
                chosen.append(at)
                left = [need - gift for need, gift in zip(left, self._gives[at], strict=True)]
        return sorted(chosen)

    def _pruned(self, chosen: list[int]) -> list[int]:
        spare = [-need for need in self._missing]
        for at in chosen:
            spare = [more + gift for more, gift in zip(spare, self._gives[at], strict=True)]
        kept = []
        for at in sorted(chosen, reverse=True):
            less = [more - gift for more, gift in zip(spare, self._gives[at], strict=True)]
            if all(more >= 0 for more in less):
                spare = less
            else:
                kept.append(at)
        return sorted(kept)

    def _keep(self, chosen: list[int]) -> None:
        rank = (sum(self._costs[at] for at in chosen), len(chosen))
        if self._best is None or rank < self._best[:2]:
            self._best = (*rank, chosen)

    def _descend(self, at: int, chosen: list[int], cost: float, missing: list[int]) -> None:
        assert self._best is not None
        if all(need <= 0 for need in missing):
            self._keep(chosen)
            return
        self._steps -= 1
        if self._steps < 0 or at == len(self._costs):
            return
        if any(have < need for have, need in zip(self._later[at], missing, strict=True)):
            return
        dearer = cost + self._costs[at]
        if dearer > self._best[0] * _ROUNDING:  # even the cheapest remaining item is too expensive
            return
        if any(
            cost + self._least(k, need, at) > self._best[0] * _ROUNDING for k, need in enumerate(missing) if need > 0
        ):
            return
        left = [need - gift for need, gift in zip(missing, self._gives[at], strict=True)]
        self._descend(at + 1, [*chosen, at], dearer, left)
        self._descend(at + 1, chosen, cost, missing)

    def _least(self, k: int, need: float, at: int) -> float:
        """The least cost of the rest of a resource from divisible items at `at` and later."""
        spent = 0.0
        rest = ((rate, self._gives[i][k]) for rate, i in self._by_rate[k] if i >= at)  # they are known to suffice
        while need > 0:
            rate, here = next(rest)
            spent += rate * min(here, need)
            need -= here
        return spent
