"""The controller: one actor per cluster that keeps an actor on every node and publishes the membership."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from dataclasses import dataclass, field
from typing import Any

from headgate.ray_cluster import node_actors
from headgate.ray_cluster.cluster_errors import reason
from headgate.ray_cluster.node_report import Member, NodeReport, ServiceSettings, State, membership
from headgate.ray_cluster.service_placement import RayNode, changes
from headgate.shared.log import set_up

log = logging.getLogger(__name__)

NODES_SECONDS = 1.0
"""Interval at which the nodes of the cluster are listed."""
REPORT_SECONDS = 30.0
"""How long an actor waits for a change of its report before it answers."""
ADOPT_SECONDS = 10.0
"""How long a restarted controller waits for the report of an actor that runs."""
RETRY_SECONDS = (0.5, 30.0)
"""First and longest delay before a restart of an actor that was lost or could not start."""


@dataclass
class _Followed:
    """A node: its last report, its actor, and the task that follows it."""

    node: RayNode
    report: NodeReport
    actor: Any = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Controller:
    """Starts an actor on every new node that is not off, follows its reports, and forgets nodes that have left.

    After a restart it finds the actors that run. It publishes nothing before it has found them. `cluster` has the
    functions of `node_actors`. Must be created in a running event loop.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        cluster: Any = node_actors,
        nodes_seconds: float = NODES_SECONDS,
        retry_seconds: tuple[float, float] = RETRY_SECONDS,
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._nodes_seconds = nodes_seconds
        self._retry_seconds = retry_seconds
        self._nodes: dict[str, _Followed] = {}
        self._members: list[Member] = []
        self._is_settled = False
        self._changed = asyncio.Event()
        self._running = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Ends the tasks; actors and services keep running."""
        tasks = [self._running, *(each.task for each in self._nodes.values() if each.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def settings(self) -> ServiceSettings:
        """The settings of the services, without the token."""
        return dataclasses.replace(self._settings, token="")

    async def reports(self) -> list[NodeReport] | None:
        """The last report of each node, sorted by name; None before the nodes are listed."""
        found = sorted((each.report for each in self._nodes.values()), key=lambda report: report.name)
        return found if self._is_settled else None

    async def membership(self, seen: list[Member] | None, seconds: float) -> list[Member] | None:
        """Returns the membership when it differs from `seen`, at the latest after `seconds`; None if still unknown."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not self._is_settled or self._members == seen:
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - loop.time())
            except TimeoutError:
                break
        return self._members if self._is_settled else None

    async def _run(self) -> None:
        while True:
            try:
                alive = await asyncio.to_thread(self._cluster.alive_nodes)
                if not self._is_settled:
                    await self._adopt({node.id: node for node in alive})
                self._apply(alive)
                self._publish(settled=True)
            except Exception:
                log.exception("updating the list of nodes failed; trying again in %g s", self._nodes_seconds)
            await asyncio.sleep(self._nodes_seconds)

    async def _adopt(self, alive: dict[str, RayNode]) -> None:
        """Takes over the running actors of nodes that are alive, with the names in their reports."""
        found = await asyncio.to_thread(self._cluster.running_actors)

        async def adopt(node: RayNode, actor: Any) -> None:
            try:
                report = await asyncio.wait_for(actor.report.remote(None, 0.0), ADOPT_SECONDS)
            except Exception as error:  # `_apply` starts it again
                log.warning("the actor of node %s does not answer: %s", node.id, error)
                return
            self._follow(node, report, actor)

        await asyncio.gather(*(adopt(alive[id], actor) for id, actor in found.items() if id in alive))

    def _apply(self, alive: list[RayNode]) -> None:
        todo = changes(alive, {id: each.report.name for id, each in self._nodes.items()})
        for id in todo.forget:
            gone = self._nodes.pop(id)
            log.info(
                "node %s (%s) has left the cluster or has the label headgate=off; its service ends",
                gone.report.name,
                id,
            )
            if gone.task is not None:
                gone.task.cancel()
            if gone.actor is not None:
                self._cluster.end_actor(gone.actor)
        for node, name in todo.start:
            log.info("starting an inference service on %s (%s, %s)", name, node.address, node.id)
            self._follow(node, NodeReport(name, ""), None)

    def _follow(self, node: RayNode, report: NodeReport, actor: Any) -> None:
        followed = self._nodes[node.id] = _Followed(node, report, actor)
        followed.task = asyncio.ensure_future(self._keep_actor(followed))

    async def _keep_actor(self, followed: _Followed) -> None:
        """Starts the actor of a node, asks it for its reports, and starts it again when it is lost."""
        delay = self._retry_seconds[0]
        seen: NodeReport | None = None
        while True:
            try:
                if followed.actor is None:
                    followed.actor = await asyncio.to_thread(
                        self._cluster.start_actor, followed.node, followed.report.name, self._settings
                    )
                report = await asyncio.wait_for(followed.actor.report.remote(seen, REPORT_SECONDS), REPORT_SECONDS * 2)
            except Exception as error:
                state = State.LOST if followed.report.was_ready else State.FAILED
                detail = reason(error)
                log.warning(
                    "the actor of node %s failed or does not answer; starting it again in %g s: %s",
                    followed.report.name, delay, detail,
                )  # fmt: skip
                self._set(followed, dataclasses.replace(followed.report, state=state, pid=None, detail=detail))
                await asyncio.sleep(delay)
                delay = min(delay * 2, self._retry_seconds[1])
                followed.actor, seen = None, None
                continue
            delay = self._retry_seconds[0]
            seen = report
            # A new process of the actor has not been ready yet; gateways keep the node in the meantime.
            if followed.report.was_ready and not report.was_ready and report.url == followed.report.url:
                report = dataclasses.replace(report, was_ready=True, epoch=followed.report.epoch)
            self._set(followed, report)

    def _set(self, followed: _Followed, report: NodeReport) -> None:
        if report != followed.report:
            detail = report.detail and f": {report.detail}"
            log.info("the service of node %s is %s %s%s", report.name, report.state, report.url, detail)
        followed.report = report
        self._publish()

    def _publish(self, *, settled: bool = False) -> None:
        members = membership(each.report for each in self._nodes.values())
        if members != self._members or settled > self._is_settled:
            self._members = members
            self._is_settled = self._is_settled or settled
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()


class ControllerActor(Controller):
    """The controller as an actor, in a process of its own."""

    def __init__(self, settings: ServiceSettings) -> None:
        set_up(os.environ, in_background=True)
        super().__init__(settings)
