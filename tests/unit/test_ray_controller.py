"""The controller of a Ray cluster with a fake cluster: new, lost and returning nodes, lost actors, its own restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from headgate.ray_cluster.controller import Controller
from headgate.ray_cluster.node_report import NodeReport, ServiceSettings, State
from headgate.ray_cluster.service_placement import RayNode

SETTINGS = ServiceSettings("1", token="shared")


class _Remote:
    """A method of an actor."""

    def __init__(self, method: Any) -> None:
        self.remote = method


class FakeActor:
    """An actor whose service reports what the test sets. `error` ends its calls."""

    def __init__(self, name: str, address: str) -> None:
        self.current = NodeReport(name, f"http://{address}:8085", State.READY, "e1", was_ready=True)
        self.changed = asyncio.Event()
        self.error: Exception | None = None
        self.report = _Remote(self._report)

    async def _report(self, seen: NodeReport | None, seconds: float) -> NodeReport:
        while self.error is None and self.current == seen:
            await self.changed.wait()
        if self.error is not None:
            raise self.error
        return self.current

    def set(self, **fields: Any) -> None:
        self.current = replace(self.current, **fields)
        self._wake()

    def lose(self) -> None:
        self.error = RuntimeError("The actor died.\n  Traceback\nits worker process has died")
        self._wake()

    def _wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


@dataclass
class FakeCluster:
    """Has the functions of `node_actors`."""

    alive: list[RayNode] = field(default_factory=list)
    actors: dict[str, FakeActor] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    is_reachable: bool = True

    def alive_nodes(self) -> list[RayNode]:
        if not self.is_reachable:
            raise RuntimeError("the head does not answer")
        return list(self.alive)

    def running_actors(self) -> dict[str, FakeActor]:
        return dict(self.actors)

    def start_actor(self, node: RayNode, name: str, settings: ServiceSettings) -> FakeActor:
        assert settings.token == "shared"
        found = self.actors.get(node.id)
        if found is None or found.error is not None:
            self.started.append(name)
            self.actors[node.id] = found = FakeActor(name, node.address)
        return found

    def end_actor(self, actor: FakeActor) -> None:
        self.actors = {id: each for id, each in self.actors.items() if each is not actor}


A, B = RayNode("a1", "10.0.0.1", "a"), RayNode("b1", "10.0.0.2", "b")
Make = Callable[[FakeCluster], Controller]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Controller] = []

    def controller(cluster: FakeCluster) -> Controller:
        made.append(Controller(SETTINGS, cluster, 0.01, (0.01, 0.05)))
        return made[-1]

    yield controller
    for each in made:
        await each.close()


async def _until(controller: Controller, *names: str) -> list[Any]:
    seen: Any = None
    async with asyncio.timeout(10):
        while True:
            seen = await controller.membership(seen, 1.0)
            if seen is not None and [member["name"] for member in seen] == list(names):
                return list(seen)


async def test_services_follow_the_nodes(make: Make) -> None:
    cluster = FakeCluster([A])
    controller = make(cluster)
    assert await _until(controller, "a") == [{"name": "a", "url": "http://10.0.0.1:8085", "epoch": "e1"}]
    cluster.alive = [A, B]
    await _until(controller, "a", "b")
    cluster.alive = [replace(B, id="b2")]  # `a` is lost, `b` was restarted
    await _until(controller, "b")
    assert cluster.actors.keys() == {"b2"}
    assert cluster.started == ["a", "b", "b"]


async def test_lost_actor_is_started_again_while_gateways_keep_the_node(make: Make) -> None:
    cluster = FakeCluster([A])
    controller = make(cluster)
    members = await _until(controller, "a")
    asking = asyncio.ensure_future(controller.membership(members, 0.3))
    cluster.actors["a1"].lose()
    assert await asking == members
    assert cluster.started == ["a", "a"]
    cluster.actors["a1"].set(epoch="e2")
    assert (await controller.membership(members, 5.0)) == [{**members[0], "epoch": "e2"}]


async def test_service_that_is_not_ready_is_reported_and_not_published(make: Make) -> None:
    cluster = FakeCluster([A], {"a1": FakeActor("a", "10.0.0.1")})
    cluster.actors["a1"].set(state=State.FAILED, was_ready=False, detail="models.yaml:3: bad")
    controller = make(cluster)
    assert await _until(controller) == []
    (report,) = await controller.reports() or []
    assert (report.state, report.detail) == (State.FAILED, "models.yaml:3: bad")


async def test_restarted_controller_publishes_only_after_it_found_the_actors(make: Make) -> None:
    """And names stay: a node that joined later does not take the name of another one."""
    cluster = FakeCluster([replace(A, hostname="gpu"), replace(B, hostname="gpu")])
    cluster.actors = {"b1": FakeActor("gpu", "10.0.0.2"), "a1": FakeActor("gpu-a1", "10.0.0.1")}
    cluster.is_reachable = False
    controller = make(cluster)
    assert await controller.membership(None, 0.1) is None
    assert await controller.reports() is None
    cluster.is_reachable = True
    first = await controller.membership(None, 5.0)
    assert first is not None
    assert [member["name"] for member in first] == ["gpu", "gpu-a1"]
    assert cluster.started == []


async def test_membership_stays_while_the_nodes_cannot_be_listed(make: Make) -> None:
    cluster = FakeCluster([A])
    controller = make(cluster)
    members = await _until(controller, "a")
    cluster.is_reachable = False
    assert await controller.membership(members, 0.1) == members


async def test_settings_are_returned_without_the_token(make: Make) -> None:
    assert await make(FakeCluster()).settings() == replace(SETTINGS, token="")
