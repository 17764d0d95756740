"""Counts what workers report about stored sequences.

The counters of a worker start at 0 with its process, and again with each new context. The counters of a model and the
metrics are sums over all workers that the model has had.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from inference.authority.draft import Draft
from inference.authority.state import WorkerRecord
from inference.worker_link import KvCounts

_NOTHING = KvCounts()
_METRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hits_hot": ("kv_hits", ("hot",)),
    "hits_ram": ("kv_hits", ("ram",)),
    "hits_disk": ("kv_hits", ("disk",)),
    "misses": ("kv_misses", ()),
    "evicted": ("kv_evicted", ()),
    "invalid": ("kv_invalid", ()),
    "prefetched": ("kv_prefetches", ("read",)),
    "prefetched_used": ("kv_prefetches", ("used",)),
    "saved_bytes": ("kv_transfer_bytes", ("save",)),
    "save_seconds": ("kv_transfer_seconds", ("save",)),
    "loaded_bytes": ("kv_transfer_bytes", ("load",)),
    "load_seconds": ("kv_transfer_seconds", ("load",)),
    "disk_written_bytes": ("kv_transfer_bytes", ("write",)),
    "disk_write_seconds": ("kv_transfer_seconds", ("write",)),
    "disk_read_bytes": ("kv_transfer_bytes", ("read",)),
    "disk_read_seconds": ("kv_transfer_seconds", ("read",)),
}
"""The metric of each counter, and its labels after the model."""
_COUNTERS = (*_METRICS, "saves", "loads")
_GAUGES = tuple(item.name for item in fields(KvCounts) if item.name not in _COUNTERS)


def _grown(before: Any, now: Any) -> Any:
    return now - before if now >= before else now


def note(draft: Draft, worker: WorkerRecord, counts: KvCounts) -> None:
    """Records what a worker reports about its stored sequences. An empty report, as of a worker without a context, is
    ignored.
    """
    if counts in (_NOTHING, worker.kv_counts):
        return
    grown = {name: _grown(getattr(worker.kv_counts, name), getattr(counts, name)) for name in _COUNTERS}
    for name, (metric, labels) in _METRICS.items():
        if grown[name]:
            draft.count(metric, worker.model, *labels, amount=grown[name])
    for _ in range(grown["loads"]):
        draft.count("kv_restore_seconds", amount=grown["load_seconds"] / grown["loads"])
    draft.set_worker(worker.id, kv_counts=counts)
    if worker.model in draft.state.models:
        known = draft.model(worker.model).kv_counts
        sums = {name: getattr(known, name) + more for name, more in grown.items()}
        latest = {name: getattr(counts, name) for name in _GAUGES}
        draft.set_model(worker.model, kv_counts=KvCounts(**sums, **latest))
