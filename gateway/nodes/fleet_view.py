"""The known models of all nodes as those of one service, with the interface of `InferenceView`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from gateway.nodes.merged_models import merged
from gateway.nodes.node import Node
from gateway.providers.local.candidate_facts import LikelyFailure
from inference.protocol import ModelStatus

REFRESH_SECONDS = 0.25
"""A view of a node that is younger than this is not refreshed."""


class FleetView:
    """The models of `nodes`. Changes of a node are merged when they are read, model by model."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._nodes = nodes
        self._changed = set(nodes)
        self._parts: dict[str, Mapping[str, ModelStatus]] = {}
        self._by_model: dict[str, dict[str, ModelStatus]] = {}
        self._models: dict[str, ModelStatus] = {}
        self._aliases: dict[str, str] = {}

    def note_change(self, node: str) -> None:
        """The models of a node may have changed."""
        self._changed.add(node)

    def nodes_with(self, model: str) -> Mapping[str, ModelStatus]:
        """The status of `model` by node, for the nodes that list it."""
        self._update()
        return self._by_model.get(model, {})

    @property
    def models(self) -> Mapping[str, ModelStatus]:
        """The merged models by id, without those of nodes that do not answer."""
        self._update()
        return self._models

    @property
    def aliases(self) -> Mapping[str, str]:
        """Model id by alias."""
        self._update()
        return self._aliases

    @property
    def is_fresh(self) -> bool:
        """Whether a node has answered lately."""
        return any(node.view.is_fresh for node in self._nodes.values())

    @property
    def is_complete(self) -> bool:
        """Whether all nodes have answered lately: a model that is not listed does not exist."""
        return bool(self._nodes) and all(node.view.is_fresh for node in self._nodes.values())

    @property
    def reachable(self) -> bool | None:
        """Whether a node answers; None before the first answer or failure."""
        known = {node.view.reachable for node in self._nodes.values()}
        return True if True in known else False if False in known else None

    @property
    def reachable_since(self) -> float:
        """The time of the last change of a node's `reachable`, in Unix seconds."""
        return max((node.view.reachable_since for node in self._nodes.values()), default=0.0)

    @property
    def was_seen(self) -> bool:
        """Whether a node ever answered."""
        return any(node.view.was_seen for node in self._nodes.values())

    def likely_failure(self, model: str) -> LikelyFailure | None:
        """Why a request to `model` would likely fail on each node with it; None if one may serve it."""
        found = [self._nodes[node].view.likely_failure(model) for node in self.nodes_with(model)]
        known = [failure for failure in found if failure is not None]
        if not known or len(known) < len(found):
            return None
        return min(known, key=lambda failure: float("inf") if failure.retry_in is None else failure.retry_in)

    async def ensure(self, max_age: float) -> None:
        """Refreshes the views of nodes that answer and are older than `max_age` seconds."""
        answering = [node.view for node in self._nodes.values() if node.view.reachable is not False]
        await asyncio.gather(*(view.ensure(max_age) for view in answering))

    async def refresh(self) -> None:
        """Refreshes the views of all nodes that answer."""
        await self.ensure(REFRESH_SECONDS)

    def poll_soon(self) -> None:
        """Polls all nodes now."""
        for node in self._nodes.values():
            node.view.poll_soon()

    def _update(self) -> None:
        if not self._changed:
            return
        changed, self._changed = self._changed, set()
        models: set[str] = set()
        for name in changed & self._nodes.keys():
            before, now = self._parts.get(name, {}), self._nodes[name].view.models
            if before is now:
                continue
            self._parts[name] = now
            for model in before.keys() | now.keys():
                if before.get(model) is not (status := now.get(model)):
                    models.add(model)
                    self._set(name, model, status)
        for model in models:
            if statuses := self._by_model.get(model):
                self._models[model] = merged(statuses)
            else:
                self._models.pop(model, None)
        if models:
            self._aliases = {alias: one.id for one in self._models.values() for alias in one.aliases}

    def _set(self, node: str, model: str, status: ModelStatus | None) -> None:
        statuses = self._by_model.setdefault(model, {})
        if status is not None:
            statuses[node] = status
            return
        statuses.pop(node, None)
        if not statuses:
            del self._by_model[model]
