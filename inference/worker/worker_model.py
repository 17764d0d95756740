"""The loaded model of a worker: loads it, frees its context, and opens it again."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from inference.file_stamp import Fingerprint, fingerprint
from inference.worker import llama, malloc_trim
from inference.worker.kv.standby import HeldFile
from inference.worker.kv.tiered_store import TieredStore, open_store
from inference.worker.llama.llama_process import LogTail
from inference.worker.loading import Loaded, load, reopen
from inference.worker_link import Grant, Offloaded

log = logging.getLogger("headgate.worker")


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """A loaded model and the data that outlives its context.

    `files`: the weights and adapters as they were loaded. `store`: None for a model that does not generate.
    """

    loaded: Loaded
    grant: Grant
    tail: LogTail
    files: Fingerprint
    store: TieredStore | None


def load_worker_model(
    grant: Grant,
    held: HeldFile | None,
    arena_handle: int | None,
    write_log: Callable[[str], None],
    on_progress: Callable[[float], bool],
    on_store: Callable[[], None],
) -> WorkerModel:
    """Starts llama.cpp and loads the model, from `held` memory if it is given; raises LoadError.

    `arena_handle`: memory for sequences that outlives the process. `on_store` is called on any thread when the store of
    sequences has something to do.
    """
    os.environ.update(grant.environment)
    tail = LogTail(write_log)
    llama.start(tail)
    llama.on_abort(lambda text: write_log("\n".join([*tail.lines, text])))
    files = fingerprint(Path(grant.path), grant.lora)
    if held is None:
        loaded = load(grant, tail, on_progress)
    else:
        files = ((grant.path, held.stamp), *files[1:])
        loaded = load(replace(grant, path=held.source), tail, on_progress)
        held.close()
    generates = loaded.context.pooling <= 0
    store = open_store(loaded.context, grant, files, arena_handle, on_store) if generates else None
    return _announced(WorkerModel(loaded, grant, tail, files, store))


def reopen_worker_model(model: WorkerModel, grant: Grant) -> WorkerModel:
    """Opens a new context for a model that was offloaded in this process; raises LoadError."""
    loaded = reopen(model.loaded, grant, model.tail)
    if model.store is not None:
        model.store.attach(loaded.context, grant, model.files)
    return _announced(replace(model, loaded=loaded, grant=grant))


def free_context(model: WorkerModel) -> Offloaded:
    """Frees the context, which must be unused; returns the stored sequences in host memory."""
    model.loaded.context.close()
    malloc_trim.trim()
    saved = _stored(model)
    log.info(
        "offloaded model=%s sequences=%d tokens=%d bytes=%d",
        model.grant.model_id, saved.sequences, saved.tokens, saved.count_bytes,
    )  # fmt: skip
    return saved


def _stored(model: WorkerModel) -> Offloaded:
    if model.store is None:
        return Offloaded(0, 0, 0)
    counts = model.store.counts()
    return Offloaded(counts.ram_bytes, counts.ram_sequences, counts.ram_tokens)


def _announced(model: WorkerModel) -> WorkerModel:
    """The model with the tokens of its stored sequences in the ready message."""
    ready = replace(model.loaded.ready, restored_tokens=_stored(model).tokens)
    log.info(
        "loaded model=%s seconds=%.2f stored_tokens=%d buffers=%s",
        model.grant.model_id, ready.load_seconds, ready.restored_tokens, ready.buffers,
    )  # fmt: skip
    return replace(model, loaded=replace(model.loaded, ready=ready))
