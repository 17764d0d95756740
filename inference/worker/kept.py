"""What a worker has of a model beyond its context: loads it, opens it anew, saves what its sequences hold.

Decides neither when nor for whom; nothing here serves a request.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inference.worker import heap, llama
from inference.worker.core.keeping import Retained
from inference.worker.link import Grant, Offload, Offloaded
from inference.worker.loading import Loaded, load, reopen
from inference.worker.logtail import LogTail
from inference.worker.offload import Keep, key, restore, save, stamp
from inference.worker.standby import HeldFile

log = logging.getLogger("headgate.worker")


@dataclass(frozen=True, slots=True)
class Kept:
    """A loaded model with all that outlives its context. `under`: what saved sequences must match; `restored` are those
    that its context holds again.
    """

    loaded: Loaded
    grant: Grant
    tail: LogTail
    keep: Keep
    under: dict[str, Any]
    restored: Sequence[Retained] = ()


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
    return _told(Kept(loaded, grant, tail, keep, under, restore(loaded.context, keep, under)))


def reopen_kept(kept: Kept, grant: Grant) -> Kept:
    """A fresh context for a model that was offloaded in this process, its sequences back; raises LoadError."""
    loaded = reopen(kept.loaded, grant, kept.tail)
    return _told(replace(kept, loaded=loaded, grant=grant, restored=restore(loaded.context, kept.keep, kept.under)))


def offload(kept: Kept, retained: Sequence[Retained], order: Offload) -> Offloaded:
    """Saves sequences as `order` says and frees the context, which nobody uses any more."""
    context = kept.loaded.context
    saved = save(context, retained, kept.keep, order.most_bytes, kept.under)
    context.close()
    heap.trim()
    log.info(
        "offloaded model=%s sequences=%d tokens=%d bytes=%d",
        kept.grant.model_id, saved.sequences, saved.tokens, saved.count_bytes,
    )  # fmt: skip
    return Offloaded(saved.count_bytes, saved.sequences, saved.tokens)


def _told(kept: Kept) -> Kept:
    """With the restored tokens in what the authority is told; what was saved is not needed any more."""
    kept.keep.clear()
    ready = replace(kept.loaded.ready, restored_tokens=sum(len(item.tokens) for item in kept.restored))
    log.info(
        "loaded model=%s seconds=%.2f restored_tokens=%d buffers=%s",
        kept.grant.model_id, ready.load_seconds, ready.restored_tokens, ready.buffers,
    )  # fmt: skip
    return replace(kept, loaded=replace(kept.loaded, ready=ready))
