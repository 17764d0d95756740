"""Chooses the node for a model that is not loaded on any usable node.

The request then causes the load there, which reserves the memory. If the node refuses it, the request excludes this
node and chooses again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence

from gateway.nodes.fleet_view import FleetView
from gateway.nodes.node import Node, Spawn
from gateway.nodes.node_table import PRESENT
from gateway.nodes.plan_cost import Cost, plan_cost
from gateway.shared_state.shared_leases import Lease, Leases

log = logging.getLogger("gateway.nodes.cold_placement")

MAX_ASKED = 4
"""Nodes that are asked for their plans."""
PLAN_SECONDS = 2.0
LEASE_SECONDS = 10.0
"""How long a gateway may take to decide and to begin the load."""
FOLLOW_SECONDS = 2.0
"""How long a request waits to see where another gateway loads the model."""
RECENT_SECONDS = 5.0
"""How long further requests for the model follow a decision without asking again: its load is listed soon."""
_LOOK_SECONDS = 0.05


class ColdPlacement:
    """The decisions of one gateway. Concurrent requests for one model share a decision."""

    def __init__(
        self,
        leases: Callable[[], Leases],
        spawn: Spawn,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`draw` decides between equal nodes. With shared `leases` one gateway decides about a model; the others wait
        for its decision, for FOLLOW_SECONDS at most.
        """
        self._draw = draw
        self._leases = leases
        self._spawn = spawn
        self._clock = clock
        self._recent: dict[str, tuple[str, float]] = {}
        """Node and end of each recent decision, by model."""
        self._running: dict[str, asyncio.Task[None]] = {}
        self._held: dict[str, Lease] = {}

    async def node_for(self, model: str, nodes: Sequence[Node], view: FleetView, seconds: float) -> str | None:
        """The node among `nodes` on which to load `model`; None without a decision within `seconds`."""
        names = [node.name for node in nodes]
        if (found := self._decided(model, names)) is not None:
            return found
        task = self._running.get(model)
        if task is None:
            task = self._running[model] = self._spawn(self._decide(model, nodes[:MAX_ASKED], view), "placement")
            task.add_done_callback(lambda _: self._running.pop(model, None))
        await asyncio.wait((task,), timeout=seconds)
        return self._decided(model, names)

    def _decided(self, model: str, names: Sequence[str]) -> str | None:
        node, until = self._recent.get(model, ("", 0.0))
        return node if self._clock() < until and node in names else None

    async def _decide(self, model: str, nodes: Sequence[Node], view: FleetView) -> None:
        if model not in self._held:
            lease = await self._leases().acquire(f"placement:{model}", LEASE_SECONDS)
            if lease is not None:
                self._held[model] = lease
                self._spawn(self._release_when_listed(lease, model, view), "placement lease")
            elif (name := await _wait_until_loaded(model, view, FOLLOW_SECONDS)) is not None:
                self._note(model, name)  # by another gateway
                return
        costs = await asyncio.gather(*(_ask(node, model) for node in nodes))
        known = [(cost, node) for cost, node in zip(costs, nodes, strict=True) if cost is not None]
        if known:
            table = view.table
            best = min(
                known, key=lambda one: (one[0], _loaded_models(one[1]), table.node_load(one[1].name), self._draw())
            )
            self._note(model, best[1].name)
            log.info("loading %s on node %s: the best of %d plans", model, best[1].name, len(known))

    def _note(self, model: str, node: str) -> None:
        now = self._clock()
        self._recent = {other: one for other, one in self._recent.items() if one[1] > now}
        self._recent[model] = node, now + RECENT_SECONDS

    async def _release_when_listed(self, lease: Lease, model: str, view: FleetView) -> None:
        """Keeps the lease until the load is listed, so that another gateway sees it."""
        try:
            await _wait_until_loaded(model, view, LEASE_SECONDS)
        finally:
            del self._held[model]
            await self._leases().release(lease)


async def _wait_until_loaded(model: str, view: FleetView, seconds: float) -> str | None:
    """The node on which a model is loaded, or will be soon; None if none is listed within `seconds`."""
    for _ in range(max(1, round(seconds / _LOOK_SECONDS))):
        if (name := next(iter(view.table.loaded(model)), None)) is not None:
            return name
        await asyncio.sleep(_LOOK_SECONDS)
    return None


def _loaded_models(node: Node) -> int:
    """The number of models that `node` has loaded. Of equal plans the node with the fewest models is chosen."""
    return sum(status.state in PRESENT for status in node.view.models.values())


async def _ask(node: Node, model: str) -> Cost | None:
    """The cost of loading `model` on `node`; None if it does not fit or the node does not answer."""
    plan = await node.plan(model, PLAN_SECONDS)
    status = node.view.models.get(model)
    return None if plan is None else plan_cost(plan, None if status is None else status.load_seconds)
