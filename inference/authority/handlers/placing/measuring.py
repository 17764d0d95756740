"""Measurements of models, and the stored results."""

from __future__ import annotations

from inference.authority.draft import Draft
from inference.authority.effects import Estimate, ReadFiles
from inference.authority.events import Estimated
from inference.authority.handlers.placing import decision
from inference.authority.handlers.queries import device_view
from inference.authority.state import EstimateKey, ModelRecord
from inference.errors import InferenceError, ModelFailed
from inference.settings import ModelSpec

MOST_WAYS = 8
"""Stored estimates of divisions per model."""
MOST_SPECS = 64
"""Stored estimates of settings that only dry runs or checks use."""


def request(draft: Draft, key: EstimateKey) -> bool:
    """Begins a measurement, unless it is running. False if one of the devices is missing."""
    if draft.state.is_measuring(key.spec):
        return True
    found = {item.id: item for item in device_view.readings(draft.state, draft.now)}
    if any(name not in found for name in key.devices):
        return False
    draft.set(measuring=draft.state.measuring | {key})
    devices = tuple(found[name] for name in key.devices)
    draft.emit(Estimate(key, devices, device_view.capacities(draft.state, draft.now)))
    return True


def done(draft: Draft, event: Estimated) -> InferenceError | None:
    """A measurement ended; returns its error."""
    if event.key not in draft.state.measuring:
        return None
    draft.set(measuring=draft.state.measuring - {event.key})
    draft.plan()
    if isinstance(event.result, InferenceError):
        return event.result
    spec = event.key.spec
    before, found = draft.state.estimates_of(spec), event.result
    known = dict(before) | {event.key.placement: found}
    ways = [name for name, item in known.items() if item.counts]
    for name in ways[:-MOST_WAYS]:
        del known[name]
    estimates = {other: items for other, items in draft.state.estimates.items() if other != spec}
    draft.set(estimates={**estimates, spec: known})
    _forget_oldest(draft)
    model = draft.state.models.get(spec.id)
    if model is not None and model.effective == spec:
        draft.set_model(model.id, capabilities=model.capabilities or found.capabilities)
        if not before and 0 < found.context_trained < spec.context_length:
            draft.warning(
                "%s: context_length %d is more than the %d tokens that the model was trained with; "
                "answers may become poor beyond that", model.id, spec.context_length, found.context_trained,
            )  # fmt: skip
        draft.changed()
    return None


def _forget_oldest(draft: Draft) -> None:
    own = {model.effective for model in draft.state.models.values()}
    own |= {model.spec for model in draft.state.models.values()}
    others = [spec for spec in draft.state.estimates if spec not in own]
    gone = {*others[:-MOST_SPECS]}
    if gone:
        draft.set(estimates={spec: found for spec, found in draft.state.estimates.items() if spec not in gone})


def foresee(draft: Draft) -> None:
    """Measures models before their first request, one after the other, so that misfits are known early."""
    while draft.state.foreseen:
        model = draft.state.models.get(draft.state.foreseen[0])
        if model is not None and model.files is None and model.worker is None:
            draft.emit(ReadFiles(model.id, model.effective))
            return
        key = None if model is None else decision.unmeasured(draft.state, model, draft.now)
        if key is not None and request(draft, key):
            return
        draft.set(foreseen=draft.state.foreseen[1:])


def cannot_foresee(draft: Draft, spec: ModelSpec, error: InferenceError) -> None:
    """A model without waiting requests cannot be measured."""
    if spec.id not in draft.state.foreseen:
        return
    draft.set(foreseen=tuple(name for name in draft.state.foreseen if name != spec.id))
    draft.warning("%s cannot be measured: %s", spec.id, error.message)
    draft.set_model(spec.id, failure=error.message)
    draft.changed()


def gone(model: ModelRecord) -> ModelFailed:
    """The error of a measurement on missing devices."""
    return ModelFailed(f"the model {model.id!r} cannot be measured: its devices are missing", retry_after=1.0)
