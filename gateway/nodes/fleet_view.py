"""The known models of all nodes as those of one service, with the interface of `InferenceView`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping

from gateway.nodes.merged_models import merged
from gateway.nodes.node import Node
from gateway.nodes.node_table import NodeTable
from gateway.providers.local.candidate_facts import LikelyFailure
from inference.protocol import ModelStatus

REFRESH_SECONDS = 0.25
"""A view of a node that is younger than this is not refreshed."""

MERGE_SECONDS = 0.25
FEW_NODES = 32
"""The status of a model on more nodes is merged at most once in MERGE_SECONDS. The choice of a node does not use it."""


class FleetView:
    """The models of `nodes`. Changes of a node are merged when they are read, model by model."""

    def __init__(self, nodes: Mapping[str, Node], clock: Callable[[], float] = time.monotonic) -> None:
        self._nodes = nodes
        self._changed = set(nodes)
        self._parts: dict[str, Mapping[str, ModelStatus]] = {}
        self._table = NodeTable()
        self._models = MergedModels(self._table, clock)
        self._aliases: dict[str, str] = {}

    def note_change(self, node: str) -> None:
        """The models of a node may have changed."""
        self._changed.add(node)

    @property
    def table(self) -> NodeTable:
        """What is loaded where, as far as the nodes answer."""
        self._update()
        return self._table

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
        soonest: LikelyFailure | None = None
        for name in self.table.listed(model):
            if (failure := self._nodes[name].view.likely_failure(model)) is None:
                return None
            if soonest is None or _retry_in(failure) < _retry_in(soonest):
                soonest = failure
        return soonest

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
        has_new_names = False
        for name in changed & self._nodes.keys():
            before, now = self._parts.get(name, {}), self._nodes[name].view.models
            if before is now:
                continue
            self._parts[name] = now
            self._table.update(name, now)
            self._models.outdated |= before.keys() | now.keys()
            has_new_names |= _names(before) != _names(now)
        if has_new_names:
            self._aliases = {
                alias: status.id
                for part in self._parts.values()
                for status in part.values()
                for alias in status.aliases
            }


class MergedModels(Mapping[str, ModelStatus]):
    """The models of a table, each merged over its nodes when it is read. `outdated` are those that have changed."""

    def __init__(self, table: NodeTable, clock: Callable[[], float]) -> None:
        self._table = table
        self._clock = clock
        self._merged: dict[str, tuple[ModelStatus, float]] = {}
        self.outdated: set[str] = set()

    def __getitem__(self, model: str) -> ModelStatus:
        known = self._merged.get(model)
        if known is not None and model not in self.outdated:
            return known[0]
        table, now = self._table, self._clock()
        nodes = table.listed(model)
        if known is not None and len(nodes) > FEW_NODES and now - known[1] < MERGE_SECONDS:
            return known[0]
        self.outdated.discard(model)
        if not nodes:
            self._merged.pop(model, None)
            raise KeyError(model)
        status = merged({node: table.models_of(node)[model] for node in nodes})
        self._merged[model] = status, now
        return status

    def __contains__(self, model: object) -> bool:
        return isinstance(model, str) and bool(self._table.listed(model))

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._table.models))

    def __len__(self) -> int:
        return len(self._table.models)


def _names(models: Mapping[str, ModelStatus]) -> set[tuple[str, tuple[str, ...]]]:
    return {(model, status.aliases) for model, status in models.items()}


def _retry_in(failure: LikelyFailure) -> float:
    return float("inf") if failure.retry_in is None else failure.retry_in
