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
from inference.worker.kv.sequence_offload import Keep, key, restore, save, stamp
from inference.worker.kv.standby import HeldFile
from inference.worker.llama.llama_log import LogTail
from inference.worker.loading import Loaded, load, reopen
from inference.workers.worker_link import Grant, Offload, Offloaded

log = logging.getLogger("headgate.worker")


@dataclass(frozen=True, slots=True)
class Kept:
    """A loaded model with all that outlives its context. `under`: what saved sequences must match; `restored` are those
    that its context holds again, which took `restore_seconds`.
    """

    loaded: Loaded
    grant: Grant
    tail: LogTail
    keep: Keep
    under: dict[str, Any]
    restored: Sequence[Retained] = ()
    restore_seconds: float = 0.0


def load_kept(
    grant: Grant,
    held: HeldFile | None,
    keep_handle: int | None,
    say: Callable[[str], None],
    on_progress: Callable[[float], bool],
) -> Kept:
    """Starts llama.cpp in this process and loads the model, from `held` memory if there is; raises LoadError."""
    os.environ.update(grant.environment)
    tail = LogTail(say)
    llama.start(tail)
    llama.on_abort(lambda text: say("\n".join([*tail.lines, text])))
    keep = Keep(keep_handle)
    if held is None:
        under = key(grant, stamp(grant.path))
        return _told(Kept(load(grant, tail, on_progress), grant, tail, keep, under))
    under = key(grant, held.stamp)
    loaded = load(replace(grant, path=held.source), tail, on_progress)
    held.close()
    return _told(_restored(Kept(loaded, grant, tail, keep, under)))


def reopen_kept(kept: Kept, grant: Grant) -> Kept:
    """A fresh context for a model that was offloaded in this process, its sequences back; raises LoadError."""
    return _told(_restored(replace(kept, loaded=reopen(kept.loaded, grant, kept.tail), grant=grant)))


def offload(kept: Kept, retained: Sequence[Retained], order: Offload) -> Offloaded:
    """Saves sequences as `order` says and frees the context, which nobody uses any more."""
    context = kept.loaded.context
    saved = save(context, retained, kept.keep, order.most_bytes, kept.under)
    context.close()
    malloc_trim.trim()
    log.info(
        "offloaded model=%s sequences=%d tokens=%d bytes=%d",
        kept.grant.model_id, saved.sequences, saved.tokens, saved.count_bytes,
    )  # fmt: skip
    return Offloaded(saved.count_bytes, saved.sequences, saved.tokens)


def _restored(kept: Kept) -> Kept:
    """With the sequences in its context that were saved."""
    began = time.monotonic()
    found = restore(kept.loaded.context, kept.keep, kept.under)
    return replace(kept, restored=found, restore_seconds=time.monotonic() - began)


def _told(kept: Kept) -> Kept:
    """With the restored tokens in what the authority is told; what was saved is not needed any more."""
    kept.keep.clear()
    tokens = sum(len(item.tokens) for item in kept.restored)
    ready = replace(kept.loaded.ready, restored_tokens=tokens, restore_seconds=kept.restore_seconds)
    log.info(
        "loaded model=%s seconds=%.2f restored_tokens=%d buffers=%s",
        kept.grant.model_id, ready.load_seconds, ready.restored_tokens, ready.buffers,
    )  # fmt: skip
    return replace(kept, loaded=replace(kept.loaded, ready=ready))
