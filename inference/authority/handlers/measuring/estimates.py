"""Measurements of models, the stored results, and the files that the results belong to."""

from __future__ import annotations

from inference.authority.draft import Draft
from inference.authority.effects import Estimate
from inference.authority.events import Estimated, FilesChecked
from inference.authority.handlers.measuring import helper_contexts, read_rates
from inference.authority.handlers.queries import device_view
from inference.authority.lifecycle import Backoff
from inference.authority.quarantine import Quarantine
from inference.authority.state import EstimateKey, ModelRecord, WorkerRecord
from inference.devices.device import CPU
from inference.errors import InferenceError, ModelFailed
from inference.file_stamp import Fingerprint, changed
from inference.settings import ModelSpec

MAX_DIVISION_ESTIMATES = 8
"""Maximum number of stored estimates for divisions over several devices, for the same settings of a model."""
MAX_UNUSED_SETTINGS = 64
"""Maximum number of settings that no model has now, as those of dry runs and checks, with stored estimates."""


def request(draft: Draft, key: EstimateKey) -> bool:
    """Begins a measurement, unless one with these settings is running. False if a device is missing or the service is
    ending.
    """
    if draft.state.is_measuring(key.spec):
        return True
    if draft.state.closing:
        return False
    devices = tuple(device_view.named(draft.state, key.devices, draft.now))
    if len(devices) < len(key.devices):
        return False
    draft.set(measuring=draft.state.measuring | {key})
    helper_contexts.begin(draft, key, key.devices)
    draft.emit(Estimate(key, devices, device_view.budgets_of(draft.state, draft.now)))
    return True


def estimated(draft: Draft, event: Estimated) -> InferenceError | None:
    """A measurement ended; returns its error, or None."""
    helper_contexts.end(draft, event.key)
    if event.key not in draft.state.measuring:
        return None
    draft.set(measuring=draft.state.measuring - {event.key})
    draft.plan()
    if isinstance(event.result, InferenceError):
        return event.result
    spec = event.key.spec
    before, found = draft.state.estimates_of(spec), event.result
    read_rates.learn_rate(draft, CPU, found.host_bytes_per_second)
    known = dict(before) | {event.key.placement: found}
    ways = [name for name, item in known.items() if item.counts]
    for name in ways[:-MAX_DIVISION_ESTIMATES]:
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
    gone = {*others[:-MAX_UNUSED_SETTINGS]}
    if gone:
        draft.set(estimates={spec: found for spec, found in draft.state.estimates.items() if spec not in gone})


def devices_are_missing(model: ModelRecord) -> ModelFailed:
    """The error of a measurement on missing devices."""
    return ModelFailed(f"the model {model.id!r} cannot be measured: its devices are missing", retry_after=1.0)


# --- files -----------------------------------------------------------------------------------------------------------
def note_files(draft: Draft, id: str, files: Fingerprint) -> None:
    """The current stamps of a model's files. A loaded model keeps its results, because its worker has the old file."""
    model = draft.set_model(id, seen_files=files)
    if model.worker is not None or files == model.files:
        return
    found = "" if model.files is None else changed(model.files, files)
    draft.set_model(id, files=files)
    if found:
        forget(draft, id)
        draft.set_model(id, reduced=None, steps=(), capabilities=())
        draft.warning("the file of %s changed: %s; it is measured again", id, found)


def forget(draft: Draft, id: str) -> None:
    """Drops estimates and failures after a change of files or settings."""
    model = draft.model(id)
    specs = {model.spec, model.effective}
    forget_estimates(draft, specs)
    draft.set(fixes={key: known for key, known in draft.state.fixes.items() if key[0] not in specs})
    draft.set_model(
        id, divisions=0, backoff=Backoff(), retry_at=0.0, failure=None, quarantine=Quarantine(), shortages=()
    )
    draft.changed()


def measure_again(draft: Draft, worker: WorkerRecord) -> None:
    """A worker that grew has ended: the next estimate of its model includes what was learned from it."""
    forget_estimates(draft, {worker.spec})
    if worker.model in draft.state.models:
        draft.set(to_measure=(*draft.state.to_measure, worker.model))
        draft.plan()


def forget_estimates(draft: Draft, specs: set[ModelSpec]) -> None:
    """Drops the estimates of these settings."""
    if specs & draft.state.estimates.keys():
        draft.set(estimates={key: found for key, found in draft.state.estimates.items() if key not in specs})


def files_checked(draft: Draft, event: FilesChecked) -> None:
    """The stamps of the files of all models are known."""
    for id, files in event.files.items():
        model = draft.state.models.get(id)
        if model is None:
            continue
        worker = draft.state.worker_of(model)
        if worker is None:
            if files != model.files:
                note_files(draft, id, files)
                draft.set(to_measure=(*draft.state.to_measure, id))
                draft.plan()
        elif worker.files and files not in (worker.files, worker.reported_files):
            draft.set_worker(worker.id, reported_files=files)
            draft.warning(
                "the file of %s changed: %s; the loaded model is served until it is unloaded",
                id, changed(worker.files, files),
            )  # fmt: skip
