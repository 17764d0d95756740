"""Decides which cheapest set of models gives back enough of everything that is missing; never looks at a ledger.

A covering problem: item i costs `costs[i]` and gives `gives[i][k]` of resource k. Depth first with bounds, begun with
the greedy answer, and cut after MOST_STEPS: exact up to nine items and, with the bounds, mostly far beyond; past that
the answer is still free of anybody who need not leave, and the time is still bounded.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_STEPS = 1024


def cheapest(costs: Sequence[float], gives: Sequence[Sequence[int]], missing: Sequence[int]) -> tuple[int, ...] | None:
    """Indexes, ascending, of the set with the least cost (then the fewest) whose sums reach `missing`, or None.

    Costs and gifts are not negative; amounts in any unit, one per resource.
    """
    wanted = [k for k, count in enumerate(missing) if count > 0]
    amounts = [[gift[k] for k in wanted] for gift in gives]
    useful = sorted((i for i, gift in enumerate(amounts) if any(gift)), key=lambda i: (costs[i], i))
    search = _Search([costs[i] for i in useful], [amounts[i] for i in useful], [missing[k] for k in wanted])
    found = search.run()
    return None if found is None else tuple(sorted(useful[at] for at in found))


class _Search:
    """One search; items come with the cheapest first."""

    def __init__(self, costs: list[float], gives: list[list[int]], missing: list[int]) -> None:
        self._costs = costs
        self._gives = gives
        self._missing = missing
        self._best: tuple[float, int, list[int]] | None = None
        self._steps = 0
        later = [0] * len(missing)
        self._later = [later]
        for gift in reversed(gives):
            later = [have + more for have, more in zip(later, gift, strict=True)]
            self._later.append(later)
        self._later.reverse()

    def run(self) -> list[int] | None:
        if any(have < need for have, need in zip(self._later[0], self._missing, strict=True)):
            return None
        self._keep(self._pruned(self._greedy()))
        self._descend(0, [], 0.0, self._missing)
        assert self._best is not None
        return self._pruned(self._best[2])

    def _greedy(self) -> list[int]:
        chosen: list[int] = []
        while not self._enough(chosen):
            chosen.append(len(chosen))
        return chosen

    def _pruned(self, chosen: list[int]) -> list[int]:
        for at in sorted(chosen, reverse=True):
            if self._enough(rest := [other for other in chosen if other != at]):
                chosen = rest
        return chosen

    def _enough(self, chosen: list[int]) -> bool:
        return all(sum(self._gives[at][k] for at in chosen) >= need for k, need in enumerate(self._missing))

    def _keep(self, chosen: list[int]) -> None:
        rank = (sum(self._costs[at] for at in chosen), len(chosen))
        if self._best is None or rank < self._best[:2]:
            self._best = (*rank, chosen)

    def _descend(self, at: int, chosen: list[int], cost: float, missing: list[int]) -> None:
        assert self._best is not None
        if all(need <= 0 for need in missing):
            self._keep(chosen)
            return
        self._steps += 1
        if self._steps > MOST_STEPS or at == len(self._costs):
            return
        if any(have < need for have, need in zip(self._later[at], missing, strict=True)):
            return
        dearer = cost + self._costs[at]
        if dearer > self._best[0]:  # the cheapest that is left is too dear already
            return
        left = [need - gift for need, gift in zip(missing, self._gives[at], strict=True)]
        self._descend(at + 1, [*chosen, at], dearer, left)
        self._descend(at + 1, chosen, cost, missing)
