"""The inference services in use: follows their list, keeps a node for each, and passes on what happens at them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from gateway.breaker.breakers import Breakers
from gateway.breaker.outcome import Failure, Scope, is_local, split_key
from gateway.breaker.permits import BreakerState
from gateway.breaker.probe_schedule import Finding, Purpose
from gateway.errors import RequestError
from gateway.nodes.cold_placement import ColdPlacement
from gateway.nodes.fleet import ONLY, Change, Fleet, Member
from gateway.nodes.fleet_view import FleetView
from gateway.nodes.membership import Address, Membership
from gateway.nodes.node import Node, Spawn
from gateway.nodes.node_tls import NodeTls, read_tls
from gateway.nodes.prefixes import Prefixes
from gateway.nodes.rebalancer import Nodes, Rebalancer
from gateway.providers.local.local_provider import LocalProvider
from gateway.settings import NodeSettings
from gateway.shared_state.shared_leases import Leases
from gateway.telemetry.gateway_metrics import Telemetry
from inference.protocol import Code

log = logging.getLogger("gateway.inference_nodes")

SWEEP_SECONDS = 1.0
"""Time between two checks for nodes that have left."""


class Observer(Protocol):
    """Gets what happens, for the dashboard."""

    def on_event(self, node: str, kind: str, data: Mapping[str, Any]) -> None:
        """An event of an inference service; the name of the only one is empty."""
        ...

    def on_reachable(self, node: str, is_reachable: bool) -> None:
        """An inference service became reachable, or does not answer any more."""
        ...

    def on_breaker(self, provider: str, model: str, state: BreakerState | None) -> None:
        """A breaker has a new state; None when it was removed."""
        ...

    def on_stop(self) -> None:
        """The gateway stops: streams that do not end by themselves must end."""
        ...


class Prepared(NamedTuple):
    """New settings with what has to be read before they can be used."""

    settings: NodeSettings
    membership: Membership
    tls: NodeTls | None

    @property
    def addresses(self) -> Mapping[str, Address]:
        """The address of each known node by its name."""
        return self.membership.addresses if self.settings.nodes else {ONLY: Address(self.settings.url)}


class InferenceNodes:
    """The nodes of one gateway: none before the first `use`, which needs the event loop.

    `token` gives the secret of the gateway and the inference services, `headers` the headers of requests that change
    something at a service. `on_change` is called when nodes were added or removed, and after each `use`, before added
    nodes start.
    """

    def __init__(
        self,
        settings: NodeSettings,
        breakers: Breakers,
        telemetry: Telemetry,
        spawn: Spawn,
        leases: Callable[[], Leases],
        token: Callable[[], str],
        headers: Callable[[], Mapping[str, str]],
        observer: Callable[[], Observer | None],
        on_change: Callable[[], None],
    ) -> None:
        """Raises HeadgateError for files of `tls` that cannot be used."""
        self._breakers = breakers
        self._telemetry = telemetry
        self._spawn = spawn
        self._token = token
        self._observer = observer
        self._on_change = on_change
        self.fleet = Fleet(self._make_node)
        self.prefixes: Prefixes | None = None
        """The prefixes of prompts that the nodes have; None where there is only one service."""
        self.placement = ColdPlacement(leases, spawn)
        self._rebalancer = Rebalancer(leases, spawn, headers)
        self._current = Prepared(settings, Membership(settings), read_tls(settings.tls))
        self._complete: Membership | None = None
        """The last membership whose list was complete."""
        self._followed: Membership | None = None
        """The membership in use; None before the first `use`."""
        self._following: asyncio.Task[None] | None = None
        """Runs while nodes are configured."""
        self._twins: set[frozenset[str]] = set()
        """Pairs of names of one service that were reported."""

    async def prepare(self, settings: NodeSettings) -> Prepared:
        """What `use` needs; raises HeadgateError."""
        tls = await asyncio.to_thread(read_tls, settings.tls)
        membership = self._current.membership
        if settings != self._current.settings:
            membership = Membership(settings, membership)
        if membership is not self._followed:
            await membership.first()
        return Prepared(settings, membership, tls)

    def use(self, prepared: Prepared) -> None:
        """Uses the nodes of these settings. Requests that run keep those that they began with."""
        self._current = prepared
        self._use_members()
        if prepared.membership is not self._followed:
            self._followed = prepared.membership
            if self._following is not None:
                self._following.cancel()
            self._following = self._spawn(self._follow(), "nodes") if prepared.settings.nodes else None

    def node(self, name: str = "") -> Node:
        """The node with this name; without a name the only one. Raises RequestError."""
        nodes = self.fleet.nodes
        found = next(iter(nodes.values())) if not name and len(nodes) == 1 else nodes.get(name)
        if found is None:
            what = f"unknown node {name[:100]!r}" if name else "a node is required"
            raise RequestError(Code.INVALID_REQUEST, f"{what}; nodes: {', '.join(nodes) or 'none yet'}", param="node")
        return found

    # --- the list of nodes -------------------------------------------------------------------------------------------
    def _make_node(self, name: str, member: Member) -> Node:
        tls = None if member.tls is None else member.tls.context
        provider = LocalProvider(member.url, member.token, tls, member.server_name)
        return Node(name, member.url, provider, self._breakers, self, partial(self._on_probe, name))

    def _use_members(self) -> None:
        """The first complete list of a configuration is final: nodes that it lacks leave at once."""
        settings, membership, tls = self._current
        is_final = membership.is_complete and membership is not self._complete
        self._complete = membership if membership.is_complete else self._complete
        token = self._token()
        members = {name: Member(one.url, token, tls, one.server_name) for name, one in self._current.addresses.items()}
        if not settings.nodes:
            self.prefixes = None
        elif self.prefixes is None:
            self.prefixes = Prefixes(token)
        self._changed(self.fleet.use(members, is_final=is_final))

    def _changed(self, change: Change) -> None:
        for node in change.removed:
            self._breakers.forget(node.key)
            self._telemetry.forget_node(node.name)
            if self.prefixes is not None:
                self.prefixes.index.forget(node.name)
        self._on_change()
        for node in change.added:
            node.start(self._spawn)

    async def _follow(self) -> None:
        """Follows the sources of nodes, rebalances models, and removes nodes that have left and are silent."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._current.membership.run(self._use_members))
            group.create_task(self._rebalancer.run(self._nodes_to_rebalance))
            while True:
                await asyncio.sleep(SWEEP_SECONDS)
                if (change := self.fleet.sweep()).removed:
                    self._changed(change)

    def _nodes_to_rebalance(self) -> Nodes | None:
        view = self.fleet.view
        if not isinstance(view, FleetView):
            return None
        replicas = {view.aliases.get(name, name): count for name, count in self._current.settings.replicas.items()}
        return Nodes(self.fleet.nodes, view, replicas)

    # --- what happens at nodes (see `NodeObserver`) ------------------------------------------------------------------
    def on_event(self, node: Node, kind: str, data: Mapping[str, Any]) -> None:
        """See `NodeObserver`."""
        if self.prefixes is not None:
            self.prefixes.apply(node.name, kind, data)
        if kind == "snapshot":
            self._note_twins(node)
        if (observer := self._observer()) is not None:
            observer.on_event(node.name, kind, data)

    def _note_twins(self, node: Node) -> None:
        """Warns once of two names of one service, which count its slots twice."""
        for other in self.fleet.nodes.values():
            pair = frozenset((other.name, node.name))
            is_twin = other is not node and node.epoch is not None and other.epoch == node.epoch
            if is_twin and pair not in self._twins:
                self._twins.add(pair)
                log.warning(
                    "the nodes %s (%s) and %s (%s) are the same inference service; remove one of them",
                    other.name, other.url, node.name, node.url,
                )  # fmt: skip

    def on_reachable(self, node: Node, is_reachable: bool) -> None:
        """See `NodeObserver`."""
        self._telemetry.node_up.labels(node.name).set(is_reachable)
        if (observer := self._observer()) is not None:
            observer.on_reachable(node.name, is_reachable)

    def on_models(self, node: Node) -> None:
        """See `NodeObserver`."""
        self.fleet.note_change(node)

    def on_breaker(self, provider: str, model: str, state: BreakerState | None) -> None:
        """A breaker has a new state; None when it was removed."""
        if (node := self._node_of(provider)) is not None:
            node.prober.on_state(model, state)
            if not model and state is BreakerState.OPEN:
                node.view.poll_soon()

    def on_failure(self, provider: str, failure: Failure) -> None:
        """An attempt failed."""
        if failure.scope is Scope.PROVIDER and (node := self._node_of(provider)) is not None:
            node.prober.suspect()

    def _node_of(self, key: str) -> Node | None:
        """The node whose breakers have this key."""
        return self.fleet.nodes.get(split_key(key)[1]) if is_local(key) else None

    def _on_probe(self, node: str, purpose: Purpose, finding: Finding) -> None:
        self._telemetry.probes.labels(node, purpose, finding).inc()
