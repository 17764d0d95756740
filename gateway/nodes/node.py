"""One node: an inference service with its client, its models, its events and its probes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

import orjson

from gateway.breaker.breakers import Breakers
from gateway.breaker.outcome import provider_key
from gateway.breaker.prober import OnProbe, Prober
from gateway.errors import UpstreamError
from gateway.providers.local.inference_snapshot import Events, InferenceView
from gateway.providers.local.local_provider import LocalProvider

log = logging.getLogger("gateway.nodes.node")

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
"""Starts a background task with a name."""


class NodeObserver(Protocol):
    """Gets what happens at a node."""

    def on_event(self, node: Node, kind: str, data: Mapping[str, Any]) -> None:
        """An event of the inference service."""
        ...

    def on_reachable(self, node: Node, is_reachable: bool) -> None:
        """The service became reachable, or does not answer any more."""
        ...

    def on_models(self, node: Node) -> None:
        """The known models of the node may have changed."""
        ...


class Node:
    """One inference service. `name` is empty where only one service is configured.

    `is_listed`: whether the membership has it; a node that is not listed stays in use until it is silent.
    """

    def __init__(
        self,
        name: str,
        url: str,
        provider: LocalProvider,
        breakers: Breakers,
        observer: NodeObserver,
        on_probe: OnProbe = lambda *_: None,
    ) -> None:
        self.name = name
        self.url = url
        self.key = provider_key(name)
        self.provider = provider
        self.is_listed = True
        self.epoch: str | None = None
        """Identifies the running process of the service; None before its first event."""
        self._observer = observer
        self._is_stopped = False
        self._tasks: list[asyncio.Task[None]] = []
        self.prober = Prober(
            breakers, lambda: provider, lambda: self.view.models, on_probe=on_probe, provider=self.key
        )  # fmt: skip
        self.view = InferenceView(
            provider.get_json,
            on_return=self._on_return,
            on_missing=self.prober.suspect,
            on_ready=self.prober.probe_now,
            on_reachable=self._on_reachable,
            on_change=self._on_change,
            name=f"the inference service {name}" if name else "the inference service",
        )
        self.events = Events(lambda: provider, self, kv=bool(name))

    def start(self, spawn: Spawn) -> None:
        """Starts polling, events and probes."""
        work = {"inference-view": self.view.run, "events": self.events.run, "prober": self.prober.run}
        suffix = f" {self.name}" if self.name else ""
        self._tasks = [spawn(run(), name + suffix) for name, run in work.items()]

    def stop(self) -> None:
        """Ends the background tasks. The client stays usable: running requests may need it."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()

    async def plan(self, model: str, seconds: float) -> dict[str, Any] | None:
        """The answer of `/memory/plan`: what loading `model` would cost here; None without an answer."""
        try:
            plan = await self.provider.post_json("/memory/plan", orjson.dumps({"model": model}), seconds)
        except UpstreamError as error:
            log.info("node %s did not answer with a plan for %s: %s", self.name, model, error)
            return None
        return plan if isinstance(plan, dict) else None

    # --- events (see `inference_snapshot.Sink`) ----------------------------------------------------------------------
    def apply(self, kind: str, data: Mapping[str, Any]) -> None:
        """Applies an event of the service; raises KeyError, TypeError or ValueError for a malformed one."""
        self.view.apply(kind, data)
        if kind == "snapshot":
            self.epoch = data.get("epoch")
        self._observer.on_event(self, kind, data)

    def poll_soon(self) -> None:
        """Events of the service were lost."""
        self.view.poll_soon()

    def _on_return(self) -> None:
        self.prober.probe_now()
        self.events.retry()

    def _on_reachable(self, is_reachable: bool) -> None:
        if not self._is_stopped:
            self._observer.on_reachable(self, is_reachable)

    def _on_change(self) -> None:
        if not self._is_stopped:
            self._observer.on_models(self)
