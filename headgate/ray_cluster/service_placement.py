"""Decides on which nodes of a Ray cluster an inference service runs, and under which name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LABEL = "headgate"
"""A node with the label `headgate=off` (`ray start --labels`) gets no inference service."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME_CHARS = 48
_ID_CHARS = 8


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of the cluster that is alive. `name` is what `ray start --node-name` gave it, by default its address."""

    id: str
    address: str
    hostname: str = ""
    name: str = ""
    is_off: bool = False


@dataclass(frozen=True, slots=True)
class Changes:
    """`start`: the nodes on which a service starts, each with the name of the service. `forget`: the ids of known nodes
    that are not alive any more, or off.
    """

    start: tuple[tuple[RayNode, str], ...]
    forget: tuple[str, ...]


def changes(alive: Iterable[RayNode], known: Mapping[str, str]) -> Changes:
    """What turns the `known` services (names by node id) into one service per node that is alive and not off.

    The names of known services stay. A new service gets the `base_name` of its node. If that is in use, the
    beginning of the node's id is appended; if that is in use too, the name is the id.
    """
    wanted = {node.id: node for node in alive if not node.is_off}
    forget = tuple(sorted(known.keys() - wanted.keys()))
    taken = {name for id, name in known.items() if id in wanted}
    start = []
    for id in sorted(wanted.keys() - known.keys()):
        name = base_name(wanted[id])
        if name in taken:
            name = f"{name}-{id[:_ID_CHARS]}"
        if name in taken:
            name = id
        taken.add(name)
        start.append((wanted[id], name))
    return Changes(tuple(start), forget)


def base_name(node: RayNode) -> str:
    """The name that was given to the node, else its host name, else its address, with characters that gateways accept
    in names of nodes. The id if nothing is left of the name.
    """
    given = node.name if node.name != node.address else ""
    name = _NOT_IN_NAMES.sub("-", given or node.hostname or node.address)[:_MAX_NAME_CHARS]
    return name if name.strip("-") else node.id
