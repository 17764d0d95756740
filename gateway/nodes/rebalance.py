"""Which models need another copy on another node, and where.

A model gets a copy when it has fewer than its `replicas`, when most slots of its copies are in use, or when all of
its copies are on busy nodes. Copies are only added: a node unloads an idle model by itself, and `kept` copies are used
often enough to stay. A need has to last for HOLD_SECONDS, a model gets one copy at a time (with many copies an eighth
more), and a copy for load evicts nothing, so that copies do not displace each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any, NamedTuple

from gateway.nodes.node_choice import load_bound
from gateway.nodes.node_table import NodeTable
from gateway.nodes.plan_cost import plan_cost
from inference.protocol import ModelState

HOLD_SECONDS = 15.0
"""How long a need must last. It is longer than the restart of a node, which causes no copies."""
REST_SECONDS = 10.0
"""The shortest time between two copies of a model, so that the second is a decision about the effect of the first."""
REFUSED_SECONDS = 60.0
"""How long a node without room for a model is not asked again."""
FULL = 0.6
"""The share of its slots from which a model gets another copy: above it, a conversation often finds the node with its
prefix full."""
GROWTH = 0.125
"""The share of its copies that a model gets at a time, at least one."""
KEEP_SECONDS = 20.0
"""A kept copy that is idle for longer gets a load request, so that its node does not unload it."""
MAX_PLANS = 4
"""How many nodes are asked for a plan."""

_LOADING = frozenset((ModelState.LOADING, ModelState.RESTORING))
_READY = frozenset((ModelState.READY, ModelState.BUSY))


class Copy(NamedTuple):
    """A model that needs another copy: why, and the nodes to ask for a plan, the best first."""

    model: str
    reason: str
    nodes: tuple[str, ...]
    may_evict: bool


class RebalanceState(NamedTuple):
    """What one decision leaves for the next: since when a model needs a copy, and when it may get the next one.

    `relieved`: until when a busy node causes no other copy. `refused`: until when a node is not asked again for a
    model, because it had no room.
    """

    since: Mapping[str, float] = {}
    not_before: Mapping[str, float] = {}
    relieved: Mapping[str, float] = {}
    refused: Mapping[tuple[str, str], float] = {}

    def after_refusal(self, model: str, nodes: Iterable[str], now: float) -> RebalanceState:
        """The state after `nodes` had no room for `model`."""
        return self._replace(refused={**self.refused, **{(model, node): now + REFUSED_SECONDS for node in nodes}})


class Rebalancing(NamedTuple):
    """A decision: copies to load, and kept copies (model, node) that need a load request to stay."""

    state: RebalanceState
    copies: tuple[Copy, ...]
    kept: tuple[tuple[str, str], ...]


def rebalance(
    table: NodeTable,
    replicas: Mapping[str, int],
    state: RebalanceState,
    now: float,
    unavailable: Collection[str] = frozenset(),
) -> Rebalancing:
    """The copies to load now. `unavailable` nodes do not answer: their copies do not count.

    `replicas`: on how many nodes a model is kept.
    """
    fleet = _Fleet(table, replicas, unavailable)
    refused = {key: until for key, until in state.refused.items() if until > now}
    not_before = {model: until for model, until in state.not_before.items() if until > now}
    relieved = {node: until for node, until in state.relieved.items() if until > now}
    since: dict[str, float] = {}
    copies: list[Copy] = []
    for model, usage in fleet.models():
        missing = fleet.missing(model, usage)
        too_few = missing or usage.full
        if (reason := too_few or fleet.busy(usage)) is None:
            continue
        since[model] = state.since.get(model, now)
        busy_nodes = () if too_few else usage.nodes
        if now - since[model] < HOLD_SECONDS or model in not_before or not relieved.keys().isdisjoint(busy_nodes):
            continue
        nodes = [node for node in fleet.targets(model, missing is not None) if (model, node) not in refused]
        if nodes:
            not_before[model] = now + REST_SECONDS
            relieved |= dict.fromkeys(busy_nodes, now + REST_SECONDS)
        for first in range(0, min(len(nodes), MAX_PLANS * (1 if missing else usage.more)), MAX_PLANS):
            fleet.coming[nodes[first]] += 1
            copies.append(Copy(model, reason, tuple(nodes[first : first + MAX_PLANS]), missing is not None))
    return Rebalancing(RebalanceState(since, not_before, relieved, refused), tuple(copies), tuple(fleet.kept()))


def cheapest(copy: Copy, plans: Mapping[str, Mapping[str, Any]], protected: Mapping[str, Set[str]]) -> str | None:
    """The node that loads `copy` at the lowest cost, by the nodes' answers of `/memory/plan`; None if none has room.

    `protected`: models by node that must not be evicted.
    """
    possible = []
    for place, node in enumerate(copy.nodes):
        plan = plans.get(node, {})
        evicted = plan.get("evict") or ()
        if evicted and (not copy.may_evict or not protected.get(node, frozenset()).isdisjoint(evicted)):
            continue
        if (cost := plan_cost(plan, None)) is not None:
            possible.append((cost, place, node))
    return min(possible)[-1] if possible else None


def protected(table: NodeTable, replicas: Mapping[str, int]) -> dict[str, set[str]]:
    """By node, the models that have no more copies than their `replicas`, so that none of them may be evicted."""
    found: dict[str, set[str]] = {}
    for model, wanted in replicas.items():
        nodes = table.loaded(model)
        if len(nodes) <= wanted:
            for node in nodes:
                found.setdefault(node, set()).add(model)
    return found


def shortages(table: NodeTable, replicas: Mapping[str, int]) -> list[str]:
    """The `replicas` for which too few nodes have the model, in words."""
    found = []
    for model, wanted in replicas.items():
        if (count := len(table.listed(model))) < wanted:
            found.append(f"{model} is to be loaded on {wanted} nodes; nodes with the model: {count}")
    return found


class _Usage(NamedTuple):
    """The copies of a model on nodes that answer: requests, slots, and how many copies are being loaded."""

    nodes: tuple[str, ...]
    in_flight: int
    slots: int
    loading: int

    @property
    def full(self) -> str | None:
        """Why the model needs copies for more requests; None also while as many as allowed are being loaded."""
        if self.in_flight <= max(1, FULL * self.slots) or self.loading >= self._max_loading:
            return None
        return f"its {len(self.nodes)} nodes have {self.in_flight} requests for {self.slots} slots"

    @property
    def more(self) -> int:
        """How many copies to load now: no more than are needed for the requests."""
        needed = math.ceil(self.in_flight * len(self.nodes) / (FULL * self.slots)) - len(self.nodes)
        return max(1, min(needed, self._max_loading - self.loading))

    @property
    def _max_loading(self) -> int:
        return max(1, int(GROWTH * len(self.nodes)))


class _Fleet:
    """Questions about the nodes at one moment."""

    def __init__(self, table: NodeTable, replicas: Mapping[str, int], unavailable: Collection[str]) -> None:
        self._table = table
        self._replicas = replicas
        self._unavailable = unavailable
        loads = [table.node_load(node) for node in table.nodes if node not in unavailable]
        self._mean_load = sum(loads) / len(loads) if loads else 0.0
        self._bound = load_bound(self._mean_load)
        self._kept_by_node = Counter(node for model in replicas for node in table.loaded(model))
        self.coming = Counter[str]()
        """The copies that this decision brings to a node."""

    def models(self) -> list[tuple[str, _Usage]]:
        """The models that are in use or kept, the most used first."""
        usages = ((model, self._usage(model)) for model in {*self._replicas, *self._table.loaded_models})
        found = [one for one in usages if one[1].in_flight or one[0] in self._replicas]
        return sorted(found, key=lambda one: (-one[1].in_flight, one[0]))

    def _usage(self, model: str) -> _Usage:
        nodes = [node for node in self._table.loaded(model) if node not in self._unavailable]
        statuses = [self._table.models_of(node)[model] for node in nodes]
        return _Usage(
            tuple(nodes),
            sum([status.in_flight + status.queued for status in statuses]),
            sum([status.parallel for status in statuses]),
            sum([status.state in _LOADING for status in statuses]),
        )

    def missing(self, model: str, usage: _Usage) -> str | None:
        """Why the model needs a copy for its `replicas`."""
        wanted = min(self._replicas.get(model, 0), len(self._table.listed(model)))
        loaded = len(usage.nodes)
        return f"it is loaded on {loaded} of {wanted} nodes" if loaded < wanted else None

    def busy(self, usage: _Usage) -> str | None:
        """Why the model needs a copy elsewhere: all of its nodes have more requests than others."""
        if not usage.in_flight or any(self._table.node_load(node) <= self._bound for node in usage.nodes):
            return None
        count, bound = len(usage.nodes), self._bound
        return (
            f"each of its {count} nodes has over {bound:.1f} requests; the mean of all nodes is {self._mean_load:.1f}"
        )

    def targets(self, model: str, is_missing: bool) -> list[str]:
        """The nodes for another copy, the best first; for load only nodes without more load than the mean."""
        copies = set(self._table.loaded(model))
        found = []
        for node in self._table.listed(model):
            status = self._table.models_of(node)[model]
            if node in copies or node in self._unavailable:
                continue
            if status.state is not ModelState.COLD or status.fits is False:
                continue
            load = self._table.node_load(node)
            if is_missing or load <= self._mean_load:
                kept = self._kept_by_node[node]
                found.append((kept, load + self.coming[node], status.load_seconds or 0.0, node))
        return [node for *_, node in sorted(found)]

    def kept(self) -> Iterable[tuple[str, str]]:
        """The idle copies of kept models to use, those that were used last."""
        for model, wanted in self._replicas.items():
            idle = []
            for node in self._usage(model).nodes:
                status = self._table.models_of(node)[model]
                if status.state in _READY:
                    idle.append((status.idle_seconds or 0.0, node))
            yield from ((model, node) for seconds, node in sorted(idle)[:wanted] if seconds >= KEEP_SECONDS)
