"""Applies another configuration to the running authority: what differs changes, what does not is left alone.

Decides which differences a loaded model survives; never reads a file and never refuses: that was done before. Who has
to leave because a limit was lowered is the core's to say (`inference.authority.pressure.lowered_limits`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from inference import views
from inference.authority.placement.stage import Standing
from inference.authority.pressure.lowered_limits import Limits, surplus
from inference.authority.warm.retention import HOST
from inference.environment_settings import AT_START
from inference.errors import ModelNotFound
from inference.evictions import Action, Reason
from inference.model import Model
from inference.settings import InferenceConfig, ModelSpec
from inference.wishes import held_models

if TYPE_CHECKING:
    from inference.authority.shell import Authority

log = logging.getLogger(__name__)


class Change:
    """One reload."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    def apply(self, config: InferenceConfig) -> list[str]:
        """Applies another configuration; returns the differences, one sentence each. The listening address stays."""
        said = []
        before = self._limits()
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
        self._keep(before)
        self._authority.teller.changed()
        self._authority.background.spawn(self._authority.background.foresee())
        self._authority.pump()
        return said

    def _limits(self) -> Limits:
        authority = self._authority
        return Limits(authority.ledger, views.policy(authority.settings, authority.loop.time()))

    def _keep(self, before: Limits) -> None:
        """Limits that were lowered hold from now on: who is idle leaves at once, who is busy when it is done."""
        authority, now = self._authority, self._limits()
        found = surplus(before, now, held_models(authority.models.values(), now.ledger, now.policy.now))
        is_host_short = now.ledger.excess(HOST) > 0
        for held in found.leavers:
            model = authority.models[held.model]
            if held.standing is Standing.FIXED:
                log.warning("%s is pinned or dedicated and has to leave: %s", model.id, "; ".join(found.reasons))
            action = Action.UNLOAD if is_host_short else authority.warm.action(model)
            authority.loads.leave(model, Reason.LOWERED, action, found.reasons)

    def _respecify(self, model: Model, spec: ModelSpec, changed: tuple[str, ...]) -> None:
        model.spec = spec
        if set(changed) <= ModelSpec.SOFT:
            return
        model.forget()
        model.files = None
        if model.running is not None:
            self._authority.loads.leave(model, Reason.CHANGED)
