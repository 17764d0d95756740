"""Whether models could be loaded now, with evictions: fast predictions for lists of models."""

from __future__ import annotations

from dataclasses import replace

from inference.authority.handlers.queries import device_view
from inference.authority.handlers.queries.plan_inputs import fit_of, held_models, request_for
from inference.authority.handlers.running import load_devices
from inference.authority.handlers.running.oom_recovery import can_reduce
from inference.authority.placement.plan import Refusal, Stages, refusal_now
from inference.authority.state import ModelRecord, State


class Predictions:
    """Predictions for one state; shared inputs are computed once."""

    def __init__(self, state: State, now: float) -> None:
        self._state = state
        self._now = now
        self._stages: Stages | None = None
        self._answers: dict[str, Refusal | bool | None] = {}

    def of(self, model: ModelRecord) -> Refusal | bool | None:
        """True when the model could be loaded now, the refusal when not, None while unknown."""
        if model.id not in self._answers:
            self._answers[model.id] = self._answer(model)
        return self._answers[model.id]

    def _answer(self, model: ModelRecord) -> Refusal | bool | None:
        state, now = self._state, self._now
        if self._stages is None:
            self._stages = Stages.of(state.ledger, held_models(state, now))
        allowed = load_devices.allowed(state, model, now)
        if isinstance(allowed, Refusal):
            return allowed
        request = request_for(state, model.effective, allowed)
        if request is None:
            return None
        request = replace(request, fit=fit_of(model.spec))
        refusal = refusal_now(request, self._stages, device_view.policy(state.settings, now))
        if refusal is not None and can_reduce(model, refusal, now):
            return None  # it may fit with smaller settings, which are measured when a request comes
        return refusal or True
