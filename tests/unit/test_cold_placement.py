"""The node on which a model is loaded."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from gateway.nodes.cold_placement import FOLLOW_SECONDS, LEASE_SECONDS, RECENT_SECONDS, ColdPlacement
from gateway.nodes.fleet_view import FleetView
from gateway.nodes.node import Node
from gateway.nodes.plan_cost import plan_cost
from gateway.shared_state.shared_leases import LocalLeases
from inference.protocol import ModelState, ModelStatus
from tests.rigs import virtual_time


def test_plans_are_compared_by_memory_then_settings_evictions_speed_and_time() -> None:
    plans: list[tuple[dict[str, Any], float | None]] = [
        ({"result": "DEPLOYED"}, 0.0),
        ({"result": "FREE", "expected": {"tokens_per_second": 90}}, 9.0),
        ({"result": "FREE", "expected": {"tokens_per_second": 20}}, 2.0),
        ({"result": "FREE", "expected": None}, 3.0),
        ({"result": "FREE"}, None),
        ({"result": "FREE", "changes": {"context_length": 64}}, 1.0),
        ({"result": "FULL", "evict": ["a"]}, 1.0),
        ({"result": "FULL", "evict": ["a", "b"]}, 1.0),
    ]
    costs = [plan_cost(plan, seconds) for plan, seconds in plans]
    assert None not in costs
    assert costs == sorted(cast(Any, costs))
    assert plan_cost({"result": "CANT_ACCOMMODATE"}, 1.0) is None
    assert plan_cost({}, 1.0) is None


class Service:
    """A node with a plan; None: it does not answer."""

    def __init__(self, name: str, result: str | None, seconds: float = 0.1) -> None:
        self.name = name
        self.result = result
        self.seconds = seconds
        self.questions = 0
        models = {"m": ModelStatus("m", ModelState.COLD)}
        self.view = SimpleNamespace(models=models)

    async def plan(self, model: str, seconds: float) -> Any:
        self.questions += 1
        await asyncio.sleep(self.seconds)
        return None if self.result is None else {"result": self.result}

    def loads(self, view: FleetView) -> None:
        self.view.models = {"m": ModelStatus("m", ModelState.LOADING)}
        view.note_change(self.name)


class World:
    """Two gateways with the same leases, and nodes."""

    def __init__(self, *nodes: Service) -> None:
        loop = asyncio.get_running_loop()
        self.nodes: Any = list(nodes)
        self.leases = LocalLeases(loop.time)
        self.tasks: list[asyncio.Task[None]] = []
        self.view = FleetView(cast("dict[str, Node]", {node.name: node for node in nodes}), loop.time)
        self.gateways = [ColdPlacement(lambda: self.leases, self._spawn, loop.time, lambda: 0.5) for _ in range(2)]

    def _spawn(self, work: Any, name: str) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work, name=name))
        return self.tasks[-1]

    async def node(self, gateway: int = 0, seconds: float = 5.0, without: tuple[str, ...] = ()) -> str | None:
        nodes = [node for node in self.nodes if node.name not in without]
        return await self.gateways[gateway].node_for("m", nodes, self.view, seconds)

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def test_concurrent_requests_share_one_decision_until_the_load_is_listed() -> None:
    async def work() -> None:
        world = World(Service("a", "FULL"), Service("b", "FREE"), Service("c", None), Service("d", "CANT_ACCOMMODATE"))
        assert await asyncio.gather(*(world.node() for _ in range(9))) == ["b"] * 9
        assert [node.questions for node in world.nodes] == [1, 1, 1, 1]
        assert await world.node() == "b"
        await asyncio.sleep(RECENT_SECONDS + 1)
        assert await world.node() == "b"
        assert world.nodes[0].questions == 2
        await world.end()

    virtual_time.run(work())


def test_refused_node_is_left_out_of_the_next_decision() -> None:
    async def work() -> None:
        world = World(Service("a", "FULL"), Service("b", "FREE"))
        assert await world.node() == "b"
        began = asyncio.get_running_loop().time()
        assert await world.node(without=("b",)) == "a"
        assert asyncio.get_running_loop().time() - began < 1.0, "it still has the lease"
        await world.end()

    virtual_time.run(work())


def test_second_gateway_follows_the_first() -> None:
    async def work() -> None:
        world = World(Service("a", "FREE"), Service("b", "FREE"))
        first = await world.node()
        follower = asyncio.create_task(world.node(1))
        await asyncio.sleep(0.5)
        next(node for node in world.nodes if node.name == first).loads(world.view)
        assert await follower == first
        assert sum(node.questions for node in world.nodes) == 2
        await asyncio.sleep(1.0)
        assert await world.leases.acquire("placement:m", 1.0) is not None, "the lease ends when the load is listed"
        await world.end()

    virtual_time.run(work())


def test_second_gateway_decides_when_nothing_is_loaded_in_time() -> None:
    async def work() -> None:
        world = World(Service("a", "FREE"), Service("b", "FULL"))
        await world.node()
        began = asyncio.get_running_loop().time()
        assert await world.node(1) == "a"
        assert FOLLOW_SECONDS <= asyncio.get_running_loop().time() - began < LEASE_SECONDS
        await world.end()

    virtual_time.run(work())


def test_failed_decision_leaves_the_request_its_own_choice() -> None:
    async def work() -> None:
        world = World(Service("a", "FREE"), Service("b", "FREE"))
        plans, world.nodes[0].plan = world.nodes[0].plan, None
        assert await world.node() is None
        assert [type(task.exception()) for task in world.tasks if task.done()] == [TypeError]
        world.nodes[0].plan = plans
        assert await world.node() in ("a", "b")
        await world.end()

    virtual_time.run(work())


def test_no_decision_in_time_or_no_plan_that_fits() -> None:
    async def work() -> None:
        world = World(Service("a", "CANT_ACCOMMODATE"), Service("b", None, seconds=1.0))
        assert await world.node(seconds=0.5) is None
        assert await world.node() is None
        await world.end()

    virtual_time.run(work())
