"""The messages between the parts of a Ray cluster: settings of all services, report of one service, membership."""

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
    """It cannot start; it is tried again later."""
    LOST = "lost"
    """Its actor does not answer; Ray restarts it."""


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
    """The service of one node. `restarts` counts its process; `last_exit` and `detail` are text for people."""

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
    """The services that gateways use: those that were ready once. Breakers decide about those that do not answer."""
    members = [Member(name=each.name, url=each.url, epoch=each.epoch) for each in reports if each.was_ready]
    return sorted(members, key=lambda member: member["name"])
