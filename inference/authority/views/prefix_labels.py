"""Which labels of prompts (`x-headgate-prefix`) the sequences of loaded models have."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from inference.worker.kv.labels import Labels

Publish = Callable[[str, list[str], list[str]], None]
"""(model, added labels, removed labels)."""


class PrefixLabels:
    """The labels of each model, those of all its workers together."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._models: dict[str, Labels] = {}
        self._workers: dict[Hashable, tuple[str, dict[str, None]]] = {}

    def change(self, worker: Hashable, model: str, added: tuple[str, ...], removed: tuple[str, ...]) -> None:
        """A worker of `model` has other labels."""
        model, own = self._workers.setdefault(worker, (model, {}))
        labels = self._models.setdefault(model, Labels())
        new = [label for label in added if label not in own]
        lost = [label for label in removed if label in own]
        own |= dict.fromkeys(new)
        for label in lost:
            del own[label]
        labels.add(new)
        labels.remove(lost)
        self._report(model, labels)

    def forget(self, worker: Hashable) -> None:
        """A worker has ended, or its model has left the device."""
        model, own = self._workers.pop(worker, ("", {}))
        if (labels := self._models.get(model)) is None:
            return
        labels.remove(own)
        if not labels:
            del self._models[model]
        self._report(model, labels)

    def all(self) -> Mapping[str, list[str]]:
        """The labels of each model that has some, the oldest first."""
        return {model: list(labels) for model, labels in self._models.items() if labels}

    def _report(self, model: str, labels: Labels) -> None:
        added, removed = labels.take_changes()
        if added or removed:
            self._publish(model, added, removed)
