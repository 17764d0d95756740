"""Applies another configuration to the running authority: what differs changes, what does not is left alone.

Decides which differences a loaded model survives; never reads a file and never refuses: that was done before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.environment import AT_START
from inference.errors import ModelNotFound
from inference.evictions import Reason
from inference.model import Model
from inference.settings import InferenceConfig, ModelSpec

if TYPE_CHECKING:
    from inference.authority import Authority


class Change:
    """One reload."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    def apply(self, config: InferenceConfig) -> list[str]:
        """Applies another configuration; returns the differences, one sentence each. The listening address stays."""
        said = []
        for name, spec in config.models.items():
            model = self._authority.models.get(name)
            if model is None:
                self._authority.models[name] = Model(spec)
                said.append(f"model {name} added")
                continue
            if model.removed:  # by an earlier reload, and its worker has not left yet
                model.removed = False
                said.append(f"model {name} added again")
            if changed := model.spec.changed(spec):
                said.append(f"model {name} changed: {', '.join(changed)}")
                self._respecify(model, spec, changed)
        for name in [name for name in self._authority.models if name not in config.models]:
            model = self._authority.models[name]
            if not model.removed:
                said.append(f"model {name} removed")
            model.removed = True
            self._authority.waiting.fail(model, ModelNotFound(name, sorted(config.models)))
            if model.running is None:
                del self._authority.models[name]
            else:
                self._authority.loads.leave(model, Reason.REMOVED)
        old, new = self._authority.settings.model_dump(), config.settings.model_dump()
        said += [
            f"INFERENCE_{key.upper()} changed{' (applied at the next start)' if key in AT_START else ''}"
            for key in old
            if old[key] != new[key]
        ]
        self._authority.config, self._authority.settings = config, config.settings
        self._authority.observe()
        self._authority.limit()
        self._authority.warm.review()
        self._authority.teller.changed()
        self._authority.background.spawn(self._authority.background.foresee())
        self._authority.pump()
        return said

    def _respecify(self, model: Model, spec: ModelSpec, changed: tuple[str, ...]) -> None:
        model.spec = spec
        if set(changed) <= ModelSpec.SOFT:
            return
        model.estimates.clear()
        model.backoff, model.retry_at, model.failure = type(model.backoff)(), 0.0, None
        if model.running is not None:
            self._authority.loads.leave(model, Reason.CHANGED)
