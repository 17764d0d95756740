"""Loads models on further nodes in the background, as `gateway.nodes.rebalance` decides.

One gateway at a time does this, under a lease. While a configured store of shared state is lost, no gateway does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import quote

from gateway.errors import UpstreamError
from gateway.nodes.fleet_view import FleetView
from gateway.nodes.node import Node, Spawn
from gateway.nodes.rebalance import Copy, RebalanceState, cheapest, protected, rebalance, shortages
from gateway.shared_state.shared_leases import Lease, Leases
from inference.protocol import H_FENCE

log = logging.getLogger("gateway.nodes.rebalancer")

INTERVAL_SECONDS = 2.0
LEASE_SECONDS = 10.0
PLAN_SECONDS = 5.0
LOAD_SECONDS = 600.0


class Nodes(NamedTuple):
    """The nodes in use now, and on how many of them a model is kept loaded."""

    nodes: Mapping[str, Node]
    view: FleetView
    replicas: Mapping[str, int]


class Rebalancer:
    """The background work of one gateway. `headers` are those of requests that change something."""

    def __init__(
        self,
        leases: Callable[[], Leases],
        spawn: Spawn,
        headers: Callable[[], Mapping[str, str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases = leases
        self._spawn = spawn
        self._headers = headers
        self._clock = clock
        self._state = RebalanceState()
        self._lease: Lease | None = None
        self._loading: set[tuple[str, str]] = set()
        """Model and node of each load that runs."""
        self._shortages: list[str] = []

    async def run(self, nodes: Callable[[], Nodes | None]) -> None:
        """Decides every INTERVAL_SECONDS until cancelled; `nodes` returns None while there is only one service."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            try:
                if (found := nodes()) is not None:
                    await self._step(found)
            except Exception:
                log.exception("internal error in the rebalancing of models among the nodes; trying again")

    async def _step(self, found: Nodes) -> None:
        if (lease := await self._hold_lease()) is None:
            self._state = RebalanceState()
            return
        table = found.view.table
        if found.view.is_complete:
            self._note_shortages(shortages(table, found.replicas))
        away = {name for name, node in found.nodes.items() if not node.view.is_fresh or not node.is_listed}
        decision = rebalance(table, found.replicas, self._state, self._clock(), away)
        self._state = decision.state
        for copy in decision.copies:
            self._spawn(self._copy(copy, found, lease), f"copy of {copy.model}")
        for model, node in decision.kept:
            self._spawn(self._keep(model, found.nodes[node], lease), f"keep {model}")

    def _note_shortages(self, now: list[str]) -> None:
        before, self._shortages = self._shortages, now
        for text in now:
            if text not in before:
                log.warning("inference.replicas: %s", text)

    async def _hold_lease(self) -> Lease | None:
        """The lease, if this gateway has it and no other can have it."""
        leases = self._leases()
        if self._lease is None or not await leases.renew(self._lease, LEASE_SECONDS):
            lease = await leases.acquire("rebalance", LEASE_SECONDS)
            # a lease acquired while the store is lost is not kept: it could be renewed after the store is back
            self._lease = lease if lease is not None and lease.is_exclusive else None
        return self._lease

    async def _copy(self, copy: Copy, found: Nodes, lease: Lease) -> None:
        """Loads a model on the node of `copy` with the cheapest plan, while `lease` is still held."""
        answers = await asyncio.gather(*(found.nodes[name].plan(copy.model, PLAN_SECONDS) for name in copy.nodes))
        plans = {name: plan for name, plan in zip(copy.nodes, answers, strict=True) if plan is not None}
        name = cheapest(copy, plans, protected(found.view.table, found.replicas))
        if name is None:
            asked = ", ".join(copy.nodes)
            log.info("%s needs another copy (%s), but none of %s has room or answers", copy.model, copy.reason, asked)
            self._state = self._state.after_refusal(copy.model, copy.nodes, self._clock())
        elif await self._leases().renew(lease, LEASE_SECONDS):
            log.info("loading %s on node %s: %s", copy.model, name, copy.reason)
            if not await self._load(copy.model, found.nodes[name], lease, may_evict=copy.may_evict):
                self._state = self._state.after_refusal(copy.model, (name,), self._clock())

    async def _keep(self, model: str, node: Node, lease: Lease) -> None:
        """Uses a copy, so that its node does not unload it."""
        await self._load(model, node, lease)

    async def _load(self, model: str, node: Node, lease: Lease, *, may_evict: bool = True) -> bool:
        """Loads `model` on `node`, or uses it there; whether that succeeded. A load that runs is not repeated."""
        key = (model, node.name)
        if key in self._loading:
            return True
        self._loading.add(key)
        try:
            path = f"/models/{quote(model, safe='')}/load" + ("" if may_evict else "?evict=false")
            fence = {} if lease.fence is None else {H_FENCE: str(lease.fence)}
            await node.provider.post_json(path, b"", LOAD_SECONDS, {**self._headers(), **fence})
        except UpstreamError as error:
            log.warning("node %s did not load %s: %s", node.name, model, error)
            return False
        finally:
            self._loading.discard(key)
        return True
