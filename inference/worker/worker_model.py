"""The loaded model of a worker: loads it, offloads it with its sequences, and opens it again."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inference.worker import llama, malloc_trim
from inference.worker.kv.saved_sequences import Retained
from inference.worker.kv.sequence_offload import SequenceStore, key, restore, save, stamp
from inference.worker.kv.standby import HeldFile
from inference.worker.llama.llama_process import LogTail
from inference.worker.loading import Loaded, load, reopen
from inference.worker_link import Grant, Offload, Offloaded

log = logging.getLogger("headgate.worker")


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """A loaded model and the data that outlives its context.

    `under`: properties that saved sequences must match. `restored`: sequences that were restored into the context, in
    `restore_seconds`.
    """

    loaded: Loaded
    grant: Grant
    tail: LogTail
    store: SequenceStore
    under: dict[str, Any]
    restored: Sequence[Retained] = ()
    restore_seconds: float = 0.0


def load_worker_model(
    grant: Grant,
    held: HeldFile | None,
    store_handle: int | None,
    write_log: Callable[[str], None],
    on_progress: Callable[[float], bool],
) -> WorkerModel:
    """Starts llama.cpp and loads the model, from `held` memory if it is given; raises LoadError."""
    os.environ.update(grant.environment)
    tail = LogTail(write_log)
    llama.start(tail)
    llama.on_abort(lambda text: write_log("\n".join([*tail.lines, text])))
    store = SequenceStore(store_handle)
    if held is None:
        under = key(grant, stamp(grant.path))
        return _announced(WorkerModel(load(grant, tail, on_progress), grant, tail, store, under))
    under = key(grant, held.stamp)
    loaded = load(replace(grant, path=held.source), tail, on_progress)
    held.close()
    return _announced(_restored(WorkerModel(loaded, grant, tail, store, under)))


def reopen_worker_model(model: WorkerModel, grant: Grant) -> WorkerModel:
    """Opens a new context for a model that was offloaded in this process, with its sequences; raises LoadError."""
    return _announced(_restored(replace(model, loaded=reopen(model.loaded, grant, model.tail), grant=grant)))


def offload(model: WorkerModel, retained: Sequence[Retained], order: Offload) -> Offloaded:
    """Saves sequences within the limit of `order` and frees the context, which must be unused."""
    context = model.loaded.context
    saved = save(context, retained, model.store, order.most_bytes, model.under)
    context.close()
    malloc_trim.trim()
    log.info(
        "offloaded model=%s sequences=%d tokens=%d bytes=%d",
        model.grant.model_id, saved.sequences, saved.tokens, saved.count_bytes,
    )  # fmt: skip
    return Offloaded(saved.count_bytes, saved.sequences, saved.tokens)


def _restored(model: WorkerModel) -> WorkerModel:
    """The model with the saved sequences restored into its context."""
    began = time.monotonic()
    found = restore(model.loaded.context, model.store, model.under)
    return replace(model, restored=found, restore_seconds=time.monotonic() - began)


def _announced(model: WorkerModel) -> WorkerModel:
    """The model with restored tokens and duration in its ready message; the saved sequences are freed."""
    model.store.clear()
    tokens = sum(len(item.tokens) for item in model.restored)
    ready = replace(model.loaded.ready, restored_tokens=tokens, restore_seconds=model.restore_seconds)
    log.info(
        "loaded model=%s seconds=%.2f restored_tokens=%d buffers=%s",
        model.grant.model_id, ready.load_seconds, ready.restored_tokens, ready.buffers,
    )  # fmt: skip
    return replace(model, loaded=replace(model.loaded, ready=ready))
