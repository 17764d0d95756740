"""Reload of the configuration: applies the differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from inference.authority.draft import Draft
from inference.authority.events import SettingsChanged
from inference.authority.handlers.measuring import estimates
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.queries.plan_inputs import held_models
from inference.authority.handlers.running import departure, keeping, tickets
from inference.authority.lifecycle import Action, Reason
from inference.authority.placement.stage import EvictionState, Held
from inference.authority.pressure.lowered_limits import Limits, surplus
from inference.authority.retention import HOST
from inference.authority.state import ModelRecord, State
from inference.devices.device import CPU
from inference.environment_settings import AT_START
from inference.errors import ModelNotFound
from inference.protocol import ModelState
from inference.settings import InferenceConfig, ModelSpec


def differences(state: State, config: InferenceConfig) -> list[str]:
    """The differences to another configuration, one sentence each."""
    found = []
    for name, spec in config.models.items():
        model = state.models.get(name)
        if model is None:
            found.append(f"model {name} added")
            continue
        if model.removed:  # by an earlier reload; its worker has not ended yet
            found.append(f"model {name} added again")
        if changed := model.spec.changed(spec):
            found.append(f"model {name} changed: {', '.join(changed)}")
    found += [
        f"model {name} removed"
        for name, model in state.models.items()
        if name not in config.models and not model.removed
    ]
    old, new = state.settings.model_dump(), config.settings.model_dump()
    found += [
        f"INFERENCE_{key.upper()} changed{' (applied at the next start)' if _needs_restart(state, key) else ''}"
        for key in old
        if old[key] != new[key]
    ]
    return found


def _needs_restart(state: State, key: str) -> bool:
    """Whether a change of the setting takes effect at the next start.

    A service that starts with `force_cpu_mode` does not look for accelerators.
    """
    if key == "force_cpu_mode":
        return state.settings.force_cpu_mode and all(item.id == CPU for item in state.devices.measured)
    return key in AT_START


def apply(draft: Draft, event: SettingsChanged) -> None:
    """Applies another configuration, except what `_needs_restart`."""
    config, before = event.config, _limits(draft)
    for name, spec in config.models.items():
        model = draft.state.models.get(name)
        if model is None:
            draft.set(models={**draft.state.models, name: ModelRecord(spec)})
            continue
        if model.removed:
            draft.set_model(name, removed=False)
        if changed := model.spec.changed(spec):
            _respecify(draft, name, spec, changed)
    for name in [name for name in draft.state.models if name not in config.models]:
        draft.set_model(name, removed=True)
        tickets.fail(draft, name, ModelNotFound(name, sorted(config.model_ids)))
        if draft.model(name).worker is None:
            draft.drop_model(name)
        else:
            departure.leave(draft, name, Reason.REMOVED)
    ordered = {name: draft.model(name) for name in config.models}
    draft.set(models={**ordered, **draft.state.models}, config=config)
    draft.state = device_view.limited(device_view.entered(draft.state, draft.now))
    for model in list(draft.state.models.values()):
        if model.state is ModelState.WARM and keeping.obstacle(draft.state, model):
            departure.leave(draft, model.id, Reason.CHANGED)
    _apply_lowered_limits(draft, before)
    draft.kv_grows = True
    draft.set(to_measure=tuple(draft.state.models))
    draft.changed()
    draft.plan()


def _limits(draft: Draft) -> Limits:
    return Limits(draft.state.ledger, device_view.policy(draft.state.settings, draft.now))


def _apply_lowered_limits(draft: Draft, before: Limits) -> None:
    """Applies lowered limits: idle models leave at once, busy ones after their requests."""
    now = _limits(draft)
    found = surplus(before, now, _with_draining_as_idle(draft.state, held_models(draft.state, now.policy.now)))
    is_host_short = now.ledger.excess(HOST) > 0
    for held in found.evicted:
        model = draft.state.models.get(held.model)
        if model is None:
            continue
        if held.eviction_state is EvictionState.FIXED:
            draft.warning(
                "%s leaves its memory although it is pinned or dedicated: %s", model.id, "; ".join(found.reasons)
            )
        action = Action.UNLOAD if is_host_short else keeping.action_of(draft.state, model)
        departure.leave(draft, model.id, Reason.LOWERED, action, found.reasons)


def _with_draining_as_idle(state: State, models: Sequence[Held]) -> list[Held]:
    """All of `models`; one that drains for a reason that is not final counts as idle, because it may stay."""
    drained = {
        worker.holding
        for model in state.models.values()
        if model.state is ModelState.DRAINING and (worker := state.worker_of(model)) is not None
        if worker.departure is not None and not worker.departure.reason.is_final
    }
    return [replace(item, eviction_state=EvictionState.IDLE) if item.holding in drained else item for item in models]


def _respecify(draft: Draft, name: str, spec: ModelSpec, changed: tuple[str, ...]) -> None:
    before = draft.model(name).effective
    model = draft.set_model(name, spec=spec)
    if set(changed) <= ModelSpec.SOFT:
        if model.reduced is not None:
            soft = {field: getattr(spec, field) for field in changed}
            model = draft.set_model(name, reduced=replace(model.reduced, **soft))
        if known := draft.state.estimates_of(before):
            draft.set(estimates={**draft.state.estimates, model.effective: known})
        return
    estimates.forget(draft, name)
    draft.set_model(name, reduced=None, steps=(), files=None)
    if model.worker is not None:
        departure.leave(draft, name, Reason.CHANGED)
