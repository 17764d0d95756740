"""The choice of a node for one request whose turn has come, and the nodes that it has tried."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from gateway.breaker.breakers import Breakers
from gateway.breaker.outcome import Failure, Scope, Verdict
from gateway.nodes.node import Node
from gateway.providers.local.candidate_facts import queue_seconds
from inference.protocol import ModelStatus, Priority


class NoNode(NamedTuple):
    """No node takes the request now: why, and in how many seconds one may (None when unknown)."""

    message: str
    retry_in: float | None = None


class NodeSelection:
    """The nodes for one request. `needs` are the capabilities of a model that it requires."""

    def __init__(
        self,
        nodes: Mapping[str, Node],
        nodes_with: Callable[[str], Mapping[str, ModelStatus]],
        breakers: Breakers,
        needs: Collection[str],
        priority: Priority,
        *,
        fit_check: bool,
    ) -> None:
        self._nodes = nodes
        self._nodes_with = nodes_with
        self._breakers = breakers
        self._needs = needs
        self._priority = priority
        self._fit_check = fit_check
        self._excluded: dict[tuple[str, str], str] = {}
        """Why a node is not used for a model; with an empty model for all."""
        self._recovering: set[str] = set()
        """Nodes that take few requests after a failure: they are used when no other is left."""
        self.has_other = False
        """Whether the last choice had another node that could take the request."""

    def failed(self, node: str, model: str, verdict: Verdict, why: str) -> None:
        """An attempt on `node` failed: do not use it again for `model`, or at all if the service itself failed."""
        is_service = isinstance(verdict, Failure) and verdict.scope is Scope.PROVIDER
        self.exclude(node, "" if is_service else model, why)

    def exclude(self, node: str, model: str, why: str) -> None:
        """Do not use `node` for `model` (empty: for any) again."""
        self._excluded[node, model] = why

    def avoid(self, node: str) -> None:
        """Use `node` only if no other is left."""
        self._recovering.add(node)

    def choose(self, model: str) -> str | NoNode:
        """The name of the node for `model`; the reasons if there is none."""
        listed = self._nodes_with(model)
        reasons: dict[str, str] = {}
        waits: list[float] = []
        usable: list[tuple[tuple[float, ...], str]] = []
        for name in listed or self._nodes:  # an unknown model: the answer of any node is the right one
            node = self._nodes.get(name)
            if node is None:
                continue  # it was added after the request began
            if (why := self._excluded.get((name, model)) or self._excluded.get((name, ""))) is not None:
                reasons[name] = why
            elif (seconds := self._breakers.open_for(node.key, model)) is not None:
                reasons[name] = f"breaker open for another {seconds:.0f} s"
                waits.append(seconds)
            elif (seconds := self._breakers.skipped_for(node.key, model, self._priority)) is not None:
                reasons[name] = f"its queue is full for another {seconds:.0f} s"
                waits.append(seconds)
            elif (why := self._obstacle(listed.get(name))) is not None:
                reasons[name] = why
            else:
                usable.append((self._rank(node, model, listed.get(name)), name))
        self.has_other = len(usable) > 1
        if usable:
            return min(usable)[1]
        if not self._nodes:
            return NoNode("no node of inference.nodes is known yet")
        return NoNode("; ".join(f"{name}: {why}" for name, why in sorted(reasons.items())), min(waits, default=None))

    def _obstacle(self, status: ModelStatus | None) -> str | None:
        if status is None:
            return None
        if status.capabilities and (lacks := set(self._needs).difference(status.capabilities)):
            return f"cannot do {', '.join(sorted(lacks))}"
        if self._fit_check and status.fits is False:
            return f"cannot fit now: {status.reason or 'not enough memory'}"
        return None

    def _rank(self, node: Node, model: str, status: ModelStatus | None) -> tuple[float, ...]:
        """Smaller is better: sound nodes, then the shortest wait, then the fewest requests per place."""
        outstanding = self._breakers.outstanding(node.key, model)
        is_doubtful = node.name in self._recovering or node.view.likely_failure(model) is not None
        if status is None:
            return is_doubtful, 0.0, outstanding, random.random()  # noqa: S311 - spreads load, no secret
        queue = queue_seconds(status.queue_seconds, outstanding, status.parallel, status.answer_seconds)
        wait = (status.load_seconds or 0.0) + (queue or 0.0)
        return is_doubtful, wait, outstanding / max(1, status.parallel), random.random()  # noqa: S311
