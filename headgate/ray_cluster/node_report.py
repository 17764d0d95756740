"""The messages between the controller, the actors and gateways: settings of all services, reports, membership."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypedDict


class State(StrEnum):
    """State of the service of a node."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    """It cannot start. It is tried again later, except on a node with another version of Headgate."""
    LOST = "lost"
    """Its actor does not answer and is started again."""


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """How every node runs `headgate inference`.

    `token` is empty when each node uses its own. `host` is empty for the address of the node. With port 0 each node
    selects a free port once. Nodes whose `version` of Headgate differs start nothing.
    """

    version: str
    token: str = field(default="", repr=False)
    config_dir: str | None = None
    host: str = ""
    port: int = 8085


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The state of the service of one node.

    `url` is empty until the actor reports the address of its service. `epoch` is that of the service's last start.
    `restarts` is the number of restarts of the service's process; `pid` is None while no process runs. `last_exit` and
    `detail` are texts for people.
    """

    name: str
    url: str
    state: State = State.STARTING
    epoch: str = ""
    was_ready: bool = False
    restarts: int = 0
    last_exit: str = ""
    detail: str = ""
    version: str = ""
    pid: int | None = None


class Member(TypedDict):
    """A node as the gateway reads it."""

    name: str
    url: str
    epoch: str


def membership(reports: Iterable[NodeReport]) -> list[Member]:
    """The services that have been ready, sorted by name: gateways use these. Breakers of gateways handle a service that
    does not answer.
    """
    members = [Member(name=each.name, url=each.url, epoch=each.epoch) for each in reports if each.was_ready]
    return sorted(members, key=lambda member: member["name"])
