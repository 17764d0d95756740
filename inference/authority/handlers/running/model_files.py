"""Changes of model files: results for a replaced file are dropped."""

from __future__ import annotations

from inference.authority.draft import Draft
from inference.authority.effects import LookAtFiles
from inference.authority.events import FilesSeen
from inference.authority.lifecycle.transitions import Backoff
from inference.authority.quarantine import Quarantine
from inference.file_stamp import Fingerprint, changed
from inference.settings import ModelSpec

FILES_SECONDS = 5.0
"""Maximum age of file stamps for a decision; each check is used once."""


def seen(draft: Draft, id: str, files: Fingerprint) -> None:
    """The current stamps of a model's files. A loaded model keeps its results, because its worker has the old file."""
    model = draft.set_model(id, seen_files=files)
    if model.worker is not None or files == model.files:
        return
    found = "" if model.files is None else changed(model.files, files)
    draft.set_model(id, files=files)
    if found:
        forget(draft, id)
        draft.set_model(id, reduced=None, capabilities=())
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


def forget_estimates(draft: Draft, specs: set[ModelSpec]) -> None:
    """Drops the estimates of these settings."""
    if specs & draft.state.estimates.keys():
        draft.set(estimates={key: found for key, found in draft.state.estimates.items() if key not in specs})


def look(draft: Draft) -> None:
    """Begins a check of the files of all models."""
    draft.emit(LookAtFiles(tuple(model.effective for model in draft.state.models.values())))


def looked(draft: Draft, event: FilesSeen) -> None:
    """The stamps of the files of all models are known."""
    for id, files in event.files.items():
        model, worker = draft.state.models.get(id), None
        if model is None:
            continue
        worker = draft.state.worker_of(model)
        if worker is None:
            if files != model.files:
                seen(draft, id, files)
                draft.set(foreseen=(*draft.state.foreseen, id))
                draft.plan()
        elif worker.files and files not in (worker.files, worker.reported_files):
            draft.set_worker(worker.id, reported_files=files)
            draft.warning(
                "the file of %s changed: %s; the loaded model is served until it is unloaded",
                id, changed(worker.files, files),
            )  # fmt: skip
