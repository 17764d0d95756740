"""What is loaded where: the models of all nodes, and the few nodes that a request for a model has to consider.

Updates are incremental, and `nodes_for` does not depend on the number of nodes or models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from inference.protocol import ModelState, ModelStatus

MOST_LOADED = 16
"""How many of the nodes with a loaded model are considered for one request, drawn at random."""
MOST_COLD = 4
"""How many others are considered, drawn among those that list the model."""

PRESENT = frozenset((
    ModelState.READY, ModelState.BUSY, ModelState.LOADING, ModelState.RESTORING, ModelState.WARM,
    ModelState.DRAINING, ModelState.OFFLOADING,
))  # fmt: skip
"""States in which a request is served sooner than by a cold node."""


class NodeTable:
    """The models of each node, and the nodes of each model."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[str, ModelStatus]] = {}
        self._listed: dict[str, NameSet] = {}
        self._loaded: dict[str, NameSet] = {}
        self._in_flight: dict[str, int] = {}

    # --- updates -----------------------------------------------------------------------------------------------------
    def update(self, node: str, models: Mapping[str, ModelStatus]) -> None:
        """`models` are all that `node` lists now."""
        known = self._nodes.setdefault(node, {})
        for model, status in models.items():
            if known.get(model) is not status:
                self.update_model(node, status)
        for model in [model for model in known if model not in models]:
            self._forget(node, model)

    def update_model(self, node: str, status: ModelStatus) -> None:
        """The status of one model on `node` has changed."""
        models, model = self._nodes.setdefault(node, {}), status.id
        before = models.get(model)
        models[model] = status
        self._in_flight[node] = self._in_flight.get(node, 0) + status.in_flight - (before.in_flight if before else 0)
        if before is None:
            self._listed.setdefault(model, NameSet()).add(node)
        if status.state in PRESENT:
            self._loaded.setdefault(model, NameSet()).add(node)
        elif before is not None and before.state in PRESENT:
            _discard(self._loaded, model, node)

    def remove(self, node: str) -> None:
        """`node` has left."""
        for model in list(self._nodes.get(node, ())):
            self._forget(node, model)
        self._nodes.pop(node, None)
        self._in_flight.pop(node, None)

    def _forget(self, node: str, model: str) -> None:
        status = self._nodes[node].pop(model)
        self._in_flight[node] -= status.in_flight
        _discard(self._listed, model, node)
        if status.state in PRESENT:
            _discard(self._loaded, model, node)

    # --- queries -----------------------------------------------------------------------------------------------------
    @property
    def nodes(self) -> Iterable[str]:
        """The names of all nodes that have reported."""
        return self._nodes.keys()

    @property
    def models(self) -> Iterable[str]:
        """The models that a node lists."""
        return self._listed.keys()

    def models_of(self, node: str) -> Mapping[str, ModelStatus]:
        """The models of one node by id."""
        return self._nodes.get(node, {})

    def status(self, node: str, model: str) -> ModelStatus | None:
        """The status of a model on a node; None if it does not list the model."""
        return self._nodes.get(node, {}).get(model)

    def in_flight(self, node: str) -> int:
        """The requests for all models of `node`."""
        return self._in_flight.get(node, 0)

    def listed(self, model: str) -> Iterable[str]:
        """The nodes that have the model."""
        return self._listed.get(model, ())

    def loaded(self, model: str) -> Iterable[str]:
        """The nodes on which the model is loaded, or will be soon."""
        return self._loaded.get(model, ())

    def nodes_for(self, model: str, draw: Callable[[], float]) -> list[str]:
        """Nodes to consider for a request: some with the model loaded, and a few others that list it.

        `draw` returns random numbers from 0 to 1.
        """
        listed, loaded = self._listed.get(model), self._loaded.get(model)
        found = [] if loaded is None else loaded.sample(MOST_LOADED, draw)
        found += [] if listed is None else listed.sample(MOST_COLD, draw)
        return list(dict.fromkeys(found))


class NameSet:
    """A set of names with random samples in constant time per name."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._places: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._names)

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
