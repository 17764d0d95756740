"""The background work that loads models on further nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.errors import UpstreamError, UpstreamKind
from gateway.nodes.fleet_view import FleetView
from gateway.nodes.node import Node
from gateway.nodes.rebalance import HOLD_SECONDS, KEEP_SECONDS
from gateway.nodes.rebalancer import LEASE_SECONDS, Nodes, Rebalancer
from gateway.shared_state.shared_leases import Lease, LocalLeases
from inference.protocol import H_FENCE, ModelState, ModelStatus
from tests.rigs import virtual_time


class Service:
    """A node with the model `m`. `plan_of` is its plan; `refuses`: it does not load."""

    def __init__(self, name: str, state: ModelState = ModelState.COLD, **more: Any) -> None:
        self.name = name
        self.is_listed = True
        self.plan_of: dict[str, Any] | None = {"result": "FREE"}
        self.refuses = False
        self.loads: list[float] = []
        self.paths: list[str] = []
        self.fences: list[str | None] = []
        self.provider = self
        self.fleet: FleetView | None = None
        self.view = SimpleNamespace(is_fresh=True, models={})
        self.becomes(state, **more)

    def becomes(self, state: ModelState, **more: Any) -> None:
        self.view.models = {"m": ModelStatus("m", state, parallel=4, devices=("gpu-0",), **more)}
        if self.fleet is not None:
            self.fleet.note_change(self.name)

    async def plan(self, model: str, seconds: float) -> Any:
        return self.plan_of

    async def post_json(self, path: str, body: bytes, seconds: float, headers: Any) -> Any:
        assert headers["authorization"] == "Bearer admin"
        self.fences.append(headers.get(H_FENCE))
        self.paths.append(path)
        self.loads.append(asyncio.get_running_loop().time())
        await asyncio.sleep(1.0)
        if self.refuses:
            raise UpstreamError(UpstreamKind.STATUS, "no memory", status=503)
        self.becomes(ModelState.READY)
        return {}


class _Leases(LocalLeases):
    """The leases of gateways whose store is lost while `is_shared` is false. As with `SharedLeases`, a lease is renewed
    only where it was acquired.
    """

    def __init__(self, clock: Callable[[], float], *, is_shared: bool) -> None:
        super().__init__(clock, is_exclusive=True)
        self.is_shared = is_shared
        self.fence: int | None = None
        self._alone = LocalLeases(clock, is_exclusive=False)

    async def acquire(self, name: str, seconds: float) -> Lease | None:
        if not self.is_shared:
            return await self._alone.acquire(name, seconds)
        lease = await super().acquire(name, seconds)
        return None if lease is None else lease._replace(fence=self.fence)

    async def renew(self, lease: Lease, seconds: float) -> bool:
        if not lease.is_exclusive:
            return await self._alone.renew(lease, seconds)
        return self.is_shared and await super().renew(lease, seconds)


class World:
    """Gateways with the same leases over the same nodes, with `replicas` of the model."""

    def __init__(self, *services: Service, replicas: int = 0, gateways: int = 1, is_shared: bool = True) -> None:
        loop = asyncio.get_running_loop()
        self.services = services
        nodes = cast("dict[str, Node]", {service.name: service for service in services})
        view = FleetView(nodes, loop.time)
        for service in services:
            service.fleet = view
        found = Nodes(nodes, view, {"m": replicas} if replicas else {})
        self.leases = leases = _Leases(loop.time, is_shared=is_shared)
        self.tasks: list[asyncio.Task[None]] = []
        for _ in range(gateways):
            one = Rebalancer(lambda: leases, self._spawn, lambda: {"authorization": "Bearer admin"}, loop.time)
            self._spawn(one.run(lambda: found), "rebalancer")

    def _spawn(self, work: Any, name: str) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work, name=name))
        return self.tasks[-1]

    async def after(self, seconds: float) -> list[int]:
        """The number of loads at each node after `seconds`."""
        await asyncio.sleep(seconds)
        return [len(service.loads) for service in self.services]

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        ends = await asyncio.gather(*self.tasks, return_exceptions=True)
        assert [end for end in ends if not isinstance(end, asyncio.CancelledError | None)] == []


def test_model_is_loaded_on_as_many_nodes_as_replicas_by_one_gateway() -> None:
    async def work() -> None:
        services = [Service("a", ModelState.READY), Service("b"), Service("c")]
        services[1].plan_of = {"result": "FULL", "evict": ["other"]}
        world = World(*services, replicas=2, gateways=3)
        assert await world.after(HOLD_SECONDS - 3) == [0, 0, 0]
        assert await world.after(HOLD_SECONDS) == [0, 0, 1], "the cheapest plan"
        assert services[2].paths == ["/models/m/load"]
        assert (await world.after(KEEP_SECONDS))[:2] == [0, 0]
        await world.end()

    virtual_time.run(work())


def test_replicas_without_enough_nodes_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        world = World(Service("a", ModelState.READY), replicas=2)
        await world.after(10.0)
        await world.end()

    virtual_time.run(work())
    assert caplog.text.count("m is to be loaded on 2 nodes; nodes with the model: 1") == 1


def test_loads_have_the_fence_of_the_lease_if_it_has_one() -> None:
    async def work(fence: int | None) -> None:
        kept = Service("a", ModelState.READY, idle_seconds=KEEP_SECONDS + 1)
        world = World(kept, Service("b"), replicas=2)
        world.leases.fence = fence
        await world.after(HOLD_SECONDS + 5)
        expected = None if fence is None else str(fence)
        assert [set(service.fences) for service in world.services] == [{expected}, {expected}]
        await world.end()

    virtual_time.run(work(1_795_685_482_123_456))
    virtual_time.run(work(None))


def test_further_copy_of_a_busy_model_evicts_nothing() -> None:
    """Not even if the node has become full since its plan."""

    async def work() -> None:
        services = [Service("a", ModelState.BUSY, in_flight=8, queued=8), Service("b")]
        world = World(*services)
        await world.after(60.0)
        assert services[1].paths[:1] == ["/models/m/load?evict=false"]
        await world.end()

    virtual_time.run(work())


def test_node_without_room_gets_no_second_load_at_once() -> None:
    async def work() -> None:
        services = [Service("a", ModelState.READY), Service("b")]
        services[1].plan_of = None
        world = World(*services, replicas=2)
        assert await world.after(60.0) == [0, 0]
        services[1].plan_of = {"result": "FREE"}
        services[1].refuses = True
        assert (await world.after(60.0))[1] == 1
        await world.end()

    virtual_time.run(work())


def test_kept_copy_is_used_before_its_node_unloads_it() -> None:
    async def work() -> None:
        a = Service("a", ModelState.READY, idle_seconds=KEEP_SECONDS + 1)
        world = World(a, replicas=1)
        assert (await world.after(3.0)) == [1]
        await world.end()

    virtual_time.run(work())


def test_rebalancing_continues_when_a_lost_store_is_back() -> None:
    async def work() -> None:
        world = World(Service("a", ModelState.READY), Service("b"), replicas=2, is_shared=False)
        assert await world.after(60.0) == [0, 0]
        world.leases.is_shared = True
        assert await world.after(LEASE_SECONDS + HOLD_SECONDS + 5) == [0, 1]
        await world.end()

    virtual_time.run(work())


def test_copy_that_was_decided_under_an_ended_lease_is_not_loaded() -> None:
    async def work() -> None:
        a, b = Service("a", ModelState.READY), Service("b")
        world = World(a, b, replicas=2)

        async def slow_plan(model: str, seconds: float) -> Any:
            world.leases.is_shared = False
            return {"result": "FREE"}

        b.plan = slow_plan  # type: ignore[method-assign]
        assert await world.after(60.0) == [0, 0]
        await world.end()

    virtual_time.run(work())


def test_nothing_is_done_while_the_leases_are_not_shared() -> None:
    async def work() -> None:
        world = World(Service("a", ModelState.READY), Service("b"), replicas=2, is_shared=False)
        assert await world.after(60.0) == [0, 0]
        await world.end()

    virtual_time.run(work())


def test_another_gateway_takes_over_when_the_holder_of_the_lease_ends() -> None:
    async def work() -> None:
        world = World(Service("a", ModelState.READY), Service("b"), replicas=2, gateways=2)
        await asyncio.sleep(3.0)
        world.tasks[0].cancel()
        assert await world.after(LEASE_SECONDS + HOLD_SECONDS + 8) == [0, 1]
        await world.end()

    virtual_time.run(work())
