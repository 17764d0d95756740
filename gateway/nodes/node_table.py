"""What is loaded where: the models of all nodes, and the few nodes that a request for a model has to consider.

Updates are incremental, and `nodes_for` does not depend on the number of nodes or models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from inference.protocol import ModelState, ModelStatus

MAX_LOADED = 16
"""How many of the nodes with a loaded model are considered for one request, drawn at random."""
MAX_COLD = 4
"""How many nodes are considered besides, drawn among all that list the model."""

PRESENT = frozenset((
    ModelState.READY, ModelState.BUSY, ModelState.LOADING, ModelState.RESTORING, ModelState.WARM,
    ModelState.DRAINING, ModelState.OFFLOADING,
))  # fmt: skip
"""States in which a request is served sooner than by a cold node."""


class NodeTable:
    """The models of each node, and the nodes of each model."""

    def __init__(self) -> None:
        self._nodes: dict[str, _NodeModels] = {}
        self._listed: dict[str, NameSet] = {}
        self._loaded: dict[str, NameSet] = {}

    # --- updates -----------------------------------------------------------------------------------------------------
    def update(self, node: str, models: Mapping[str, ModelStatus]) -> None:
        """`models` are all that `node` lists now."""
        entry = self._nodes.setdefault(node, _NodeModels())
        for model in [model for model in entry.models if model not in models]:
            self._forget(entry, node, model)
        for status in models.values():
            self.update_model(node, status)

    def update_model(self, node: str, status: ModelStatus) -> None:
        """The status of one model on `node`."""
        entry, model = self._nodes.setdefault(node, _NodeModels()), status.id
        before = entry.models.get(model)
        if before is status:
            return
        entry.models[model] = status
        if before is None:
            self._listed.setdefault(model, NameSet()).add(node)
        else:
            entry.count(before, -1)
        entry.count(status, 1)
        is_present, was_present = status.state in PRESENT, before is not None and before.state in PRESENT
        if is_present and not was_present:
            self._loaded.setdefault(model, NameSet()).add(node)
        elif was_present and not is_present:
            _discard(self._loaded, model, node)

    def remove(self, node: str) -> None:
        """`node` has left."""
        entry = self._nodes.pop(node, None)
        if entry is not None:
            for model in list(entry.models):
                self._forget(entry, node, model)

    def _forget(self, entry: _NodeModels, node: str, model: str) -> None:
        status = entry.models.pop(model)
        entry.count(status, -1)
        _discard(self._listed, model, node)
        if status.state in PRESENT:
            _discard(self._loaded, model, node)

    # --- queries -----------------------------------------------------------------------------------------------------
    @property
    def nodes(self) -> Collection[str]:
        """The names of all nodes that have reported."""
        return self._nodes.keys()

    @property
    def models(self) -> Collection[str]:
        """The models that a node lists."""
        return self._listed.keys()

    @property
    def loaded_models(self) -> Collection[str]:
        """The models that are loaded on a node, or will be soon."""
        return self._loaded.keys()

    def models_of(self, node: str) -> Mapping[str, ModelStatus]:
        """The models of one node by id."""
        return self._nodes[node].models if node in self._nodes else {}

    def status(self, node: str, model: str) -> ModelStatus | None:
        """The status of a model on a node; None if it does not list the model."""
        return self.models_of(node).get(model)

    def in_flight(self, node: str, model: str) -> int:
        """The reported requests for a model on a node, waiting ones included."""
        status = self.status(node, model)
        return 0 if status is None else status.in_flight + status.queued

    def node_load(self, node: str) -> float:
        """The reported requests for all models of `node`, per device on which it has loaded one so far."""
        entry = self._nodes.get(node)
        return 0.0 if entry is None else entry.in_flight / max(1, len(entry.devices))

    def listed(self, model: str) -> Collection[str]:
        """The nodes that have the model."""
        return self._listed.get(model, ())

    def loaded(self, model: str) -> Collection[str]:
        """The nodes on which the model is loaded, or will be soon."""
        return self._loaded.get(model, ())

    def nodes_for(self, model: str, draw: Callable[[], float]) -> list[str]:
        """Nodes to consider for a request: some with the model loaded, and a few others that list it.

        `draw` returns random numbers from 0 to 1.
        """
        listed, loaded = self._listed.get(model), self._loaded.get(model)
        found = [] if loaded is None else loaded.sample(MAX_LOADED, draw)
        found += [] if listed is None else listed.sample(MAX_COLD, draw)
        return list(dict.fromkeys(found))


class _NodeModels:
    """The models of one node, with the sums over them that requests need."""

    def __init__(self) -> None:
        self.models: dict[str, ModelStatus] = {}
        self.in_flight = 0
        self.devices: set[str] = set()

    def count(self, status: ModelStatus, sign: int) -> None:
        """Adds (1) or subtracts (-1) a model."""
        self.in_flight += sign * (status.in_flight + status.queued)
        self.devices.update(status.devices)


class NameSet:
    """A set of names with random samples in constant time per name."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._places: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def add(self, name: str) -> None:
        """Adds a name; does nothing if it is there."""
        if name not in self._places:
            self._places[name] = len(self._names)
            self._names.append(name)

    def discard(self, name: str) -> None:
        """Removes a name; does nothing if it is not there."""
        place = self._places.pop(name, None)
        if place is None:
            return
        last = self._names.pop()
        if last != name:
            self._names[place] = last
            self._places[last] = place

    def sample(self, most: int, draw: Callable[[], float]) -> list[str]:
        """All names, or `most` random ones; names may repeat."""
        names = self._names
        count = len(names)
        if count <= most:
            return names.copy()
        return [names[min(count - 1, int(draw() * count))] for _ in range(most)]


def _discard(sets: dict[str, NameSet], model: str, node: str) -> None:
    """Removes `node` from the set of `model`, which ends with its last node."""
    names = sets[model]
    names.discard(node)
    if not names:
        del sets[model]
