"""The inference services in use: the only one of `inference.url`, or the nodes of the membership."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gateway.errors import UpstreamError, UpstreamKind
from gateway.nodes.fleet_view import FleetView
from gateway.nodes.node import Node
from gateway.nodes.node_tls import NodeTls
from gateway.providers.local.inference_snapshot import SILENCE_SECONDS, InferenceView
from gateway.providers.local.local_provider import PostJson

log = logging.getLogger("gateway.nodes.fleet")

ONLY = ""
"""The name of the node where only one service is configured."""


class Member(NamedTuple):
    """The address and credentials of a node. A node whose `Member` changes is replaced."""

    url: str
    token: str | None
    tls: NodeTls | None = None
    server_name: str | None = None


Make = Callable[[str, Member], Node]
"""Makes the node of a member with this name; it is not started yet."""


class Change(NamedTuple):
    """The nodes that `Fleet.use` and `Fleet.sweep` added and removed; a replaced node is in both."""

    added: tuple[Node, ...] = ()
    removed: tuple[Node, ...] = ()


class Fleet:
    """Keeps a node for each member. `nodes` is replaced when it changes, so that a request can keep what it has."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._members: dict[str, Member] = {}
        self.nodes: Mapping[str, Node] = {}
        self._view: FleetView | InferenceView = FleetView({})

    @property
    def is_single(self) -> bool:
        """Whether there is only the service of `inference.url`."""
        return ONLY in self.nodes

    @property
    def view(self) -> FleetView | InferenceView:
        """The models of all nodes, or of the only service."""
        return self._view

    def use(self, members: Mapping[str, Member], *, is_final: bool) -> Change:
        """Makes `members` the membership. Unchanged nodes are kept.

        A missing node is removed at once if `is_final`. Otherwise it stays in use until it is silent, because the
        source of the membership may be wrong. A change between the only service and several nodes is always final.
        """
        kept: dict[str, Node] = {}
        for name, node in self.nodes.items():
            node.is_listed = name in members
            stays = not is_final and (name == ONLY) == (ONLY in members) and not _is_silent(node)
            if self._members[name] == members.get(name) or (not node.is_listed and stays):
                kept[name] = node
        made = {name: self._make(name, member) for name, member in members.items() if name not in kept}
        self._members = {name: self._members[name] for name in kept} | dict(members)
        return self._replace({**kept, **made})

    def sweep(self) -> Change:
        """Removes nodes that are not listed and have become silent."""
        gone = [name for name, node in self.nodes.items() if not node.is_listed and _is_silent(node)]
        if not gone:
            return Change()
        for name in gone:
            del self._members[name]
        return self._replace({name: node for name, node in self.nodes.items() if name not in gone})

    def note_change(self, node: Node) -> None:
        """The models of a node may have changed."""
        if isinstance(self._view, FleetView):
            self._view.note_change(node.name)

    def ask_about(self, model: str) -> PostJson:
        """How to post to a node with `model`, a loaded one if possible, or else to any that answers; see `Counter`."""
        if self.is_single:
            return self.nodes[ONLY].provider.post_json
        waits = {
            node: math.inf if status.load_seconds is None else status.load_seconds
            for node in self.nodes.values()
            if node.view.reachable and (status := node.view.models.get(model)) is not None
        }
        any_other = next((node for node in self.nodes.values() if node.view.reachable), None)
        node = min(waits, key=waits.__getitem__) if waits else any_other
        return _no_service if node is None else node.provider.post_json

    def _replace(self, nodes: dict[str, Node]) -> Change:
        before, self.nodes = self.nodes, nodes
        added = tuple(node for name, node in nodes.items() if before.get(name) is not node)
        removed = tuple(node for name, node in before.items() if nodes.get(name) is not node)
        if not added and not removed:
            return Change()
        self._view = nodes[ONLY].view if ONLY in nodes else FleetView(nodes)
        for node in removed:
            node.stop()
            if node.name:
                log.info("node %s at %s was removed", node.name, node.url)
        for node in added:
            if node.name:
                log.info("node %s at %s was added", node.name, node.url)
        return Change(added, removed)


def _is_silent(node: Node) -> bool:
    return node.view.age > SILENCE_SECONDS


async def _no_service(path: str, body: bytes, seconds: float) -> Any:
    raise UpstreamError(UpstreamKind.CONNECT, f"POST {path}: no inference service answers")
