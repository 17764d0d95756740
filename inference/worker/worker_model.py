"""What a worker has of a model beyond its context: loads it, opens it anew, saves what its sequences hold.

Decides neither when nor for whom; nothing here serves a request.
"""

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
from inference.worker.llama.llama_log import LogTail
from inference.worker.loading import Loaded, load, reopen
from inference.workers.worker_link import Grant, Offload, Offloaded

log = logging.getLogger("headgate.worker")


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """A loaded model with all that outlives its context. `under`: what saved sequences must match; `restored` are those
    that its context holds again, which took `restore_seconds`.
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
    """Starts llama.cpp in this process and loads the model, from `held` memory if there is; raises LoadError."""
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
    """A fresh context for a model that was offloaded in this process, its sequences back; raises LoadError."""
    return _announced(_restored(replace(model, loaded=reopen(model.loaded, grant, model.tail), grant=grant)))


def offload(model: WorkerModel, retained: Sequence[Retained], order: Offload) -> Offloaded:
    """Saves sequences as `order` says and frees the context, which nobody uses any more."""
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
    """With the sequences in its context that were saved."""
    began = time.monotonic()
    found = restore(model.loaded.context, model.store, model.under)
    return replace(model, restored=found, restore_seconds=time.monotonic() - began)


def _announced(model: WorkerModel) -> WorkerModel:
    """With the restored tokens in what the authority is told; what was saved is not needed any more."""
    model.store.clear()
    tokens = sum(len(item.tokens) for item in model.restored)
    ready = replace(model.loaded.ready, restored_tokens=tokens, restore_seconds=model.restore_seconds)
    log.info(
        "loaded model=%s seconds=%.2f restored_tokens=%d buffers=%s",
        model.grant.model_id, ready.load_seconds, ready.restored_tokens, ready.buffers,
    )  # fmt: skip
    return replace(model, loaded=replace(model.loaded, ready=ready))
