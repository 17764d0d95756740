"""The nodes of a gateway, without a gateway: what runs in the background for which settings."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from gateway.breaker.breakers import Breakers
from gateway.breaker.permits import Rule
from gateway.inference_nodes import InferenceNodes
from gateway.nodes.node import Node
from gateway.settings import NodeSettings
from gateway.shared_state.shared_leases import LocalLeases
from gateway.telemetry.gateway_metrics import Telemetry


async def test_sources_of_nodes_are_followed_from_the_first_use_until_the_settings_change() -> None:
    """A reload with the same settings restarts nothing; a single service has no sources."""
    spawned: list[str] = []
    tasks: list[asyncio.Task[None]] = []
    changes: list[list[str]] = []
    used: set[Node] = set()

    def spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        work.close()
        spawned.append(name)
        tasks.append(asyncio.create_task(asyncio.sleep(60)))
        return tasks[-1]

    def on_change() -> None:
        changes.append(sorted(nodes.fleet.nodes))
        used.update(nodes.fleet.nodes.values())

    one = NodeSettings.model_validate({"nodes": ["http://127.0.0.1:1"]})
    two = NodeSettings.model_validate({"nodes": ["http://127.0.0.1:1", "http://127.0.0.1:2"]})
    single = NodeSettings()
    nodes = InferenceNodes(
        one, Breakers(Rule()), Telemetry(), spawn, LocalLeases, lambda: "token", dict, lambda: None,
        on_change,
    )  # fmt: skip
    followed = []
    for settings in (one, one, two, single, single):
        nodes.use(await nodes.prepare(settings))
        followed.append([name for name in spawned if name == "nodes" or name.startswith("prober")])
        spawned.clear()
    assert followed == [
        ["prober 127.0.0.1:1", "nodes"], [], ["prober 127.0.0.1:2", "nodes"], ["prober"], [],
    ]  # fmt: skip
    assert changes == [["127.0.0.1:1"], ["127.0.0.1:1"], ["127.0.0.1:1", "127.0.0.1:2"], [""], [""]]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for node in used:
        await node.provider.aclose()
