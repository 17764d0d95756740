"""The loaded model of a worker: loads it, frees its context, and opens it again."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from inference.file_stamp import fingerprint
from inference.worker import llama, malloc_trim
from inference.worker.kv.sequence_key import file_keys
from inference.worker.kv.tiered_store import TieredStore, open_store
from inference.worker.llama.llama_process import LogTail
from inference.worker.loading import Loaded, load, reopen
from inference.worker.warm.standby import HeldFile
from inference.worker_link import Grant, Offloaded

log = logging.getLogger("headgate.worker")


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """A loaded model and the data that outlives its context.

    `store`: None for a model that does not generate, and while the model has no context. `open_store` opens a store for
    a context.
    """

    loaded: Loaded
    grant: Grant
    tail: LogTail
    open_store: Callable[[llama.Context, Grant], TieredStore]
    store: TieredStore | None = None


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
        keys = file_keys(files)
        loaded = load(grant, tail, on_progress)
    else:
        paths = [path for path, _stamp in held.files]
        files = (*held.files, *files[len(held.files) :])
        keys = file_keys(files, dict(zip(paths, held.sources, strict=True)))
        loaded = load(replace(grant, path=held.sources[0]), tail, on_progress, held.sources)
        held.close()

    def open_with(context: llama.Context, grant: Grant) -> TieredStore:
        return open_store(context, grant, keys, arena_handle, on_store)

    return _with_store(WorkerModel(loaded, grant, tail, open_with))


def reopen_worker_model(model: WorkerModel, grant: Grant) -> WorkerModel:
    """Opens a new context for a model that was offloaded in this process; raises LoadError."""
    return _with_store(replace(model, loaded=reopen(model.loaded, grant, model.tail), grant=grant))


def free_context(model: WorkerModel, seconds: float) -> tuple[WorkerModel, Offloaded]:
    """Frees the contexts, which must be unused, and closes the store, which may write to disk for `seconds`.

    Returns the model without a store, and the counts of the stored sequences in host memory.
    """
    saved = _stored(model)
    if model.store is not None:
        model.store.close(seconds)
    for context in model.loaded.contexts:
        context.close()
    malloc_trim.trim()
    log.info(
        "offloaded model=%s sequences=%d tokens=%d bytes=%d",
        model.grant.model_id, saved.sequences, saved.tokens, saved.count_bytes,
    )  # fmt: skip
    return replace(model, store=None), saved


def _stored(model: WorkerModel) -> Offloaded:
    if model.store is None:
        return Offloaded(0, 0, 0)
    counts = model.store.counts()
    return Offloaded(counts.ram_bytes, counts.ram_sequences, counts.ram_tokens)


def _with_store(model: WorkerModel) -> WorkerModel:
    """The model with its store, and with the tokens of the stored sequences in the ready message."""
    if model.loaded.context.pooling <= 0:
        model = replace(model, store=model.open_store(model.loaded.context, model.grant))
    ready = replace(model.loaded.ready, stored_tokens=_stored(model).tokens)
    log.info(
        "loaded model=%s seconds=%.2f stored_tokens=%d buffers=%s",
        model.grant.model_id, ready.load_seconds, ready.stored_tokens, ready.buffers,
    )  # fmt: skip
    return replace(model, loaded=replace(model.loaded, ready=ready))
