"""The figures of `/memory/kv`: sequences in slots, in host memory and on disk, and what moved between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headgate.shared.units import mib
from inference.authority.state import ModelRecord, State
from inference.authority.views.inference_metrics import bytes_by_kind
from inference.worker_link import KvCounts

TRANSFERS: Mapping[str, tuple[str, str]] = {
    "save": ("saved_bytes", "save_seconds"),
    "load": ("loaded_bytes", "load_seconds"),
    "write": ("disk_written_bytes", "disk_write_seconds"),
    "read": ("disk_read_bytes", "disk_read_seconds"),
}
"""The counters of each direction: context to host memory and back, host memory to disk and back."""


def kv(state: State) -> dict[str, Any]:
    """Every model with a worker or stored sequences, their sums now, and the counters of all models since the start."""
    caches = state.ledger.caches
    shown = [
        model for model in state.models.values() if model.worker or model.id in caches or model.kv_counts.disk_sequences
    ]
    models = [_model(state, model) for model in shown]
    counts = [model.kv_counts for model in state.models.values()]
    disk_budget_mb = _disk_budget_mb(state)
    tiers = {
        name: {
            "sequences": sum(model["tiers"][name]["sequences"] for model in models),
            "tokens": sum(model["tiers"][name]["tokens"] for model in models),
            "mb": _sum(models, name, "mb"),
            "budget_mb": disk_budget_mb if name == "disk" else _sum(models, name, "budget_mb"),
        }
        for name in ("hot", "ram", "disk")
    }
    return {"total": {"tiers": tiers, **_counters(counts)}, "models": models}


def _sum(models: Sequence[Mapping[str, Any]], tier: str, name: str) -> float:
    return round(sum(float(model["tiers"][tier][name]) for model in models), 3)


def _disk_budget_mb(state: State) -> float:
    return mib(state.settings.kv_disk_bytes if state.settings.kv_enabled else 0)


def cells(state: State, model: ModelRecord) -> dict[str, int]:
    """The cells of a model's context, as of its last heartbeat."""
    kinds = bytes_by_kind(state, model)
    worker = state.worker_of(model)
    beat = worker.beat if worker and kinds else None
    return {
        "kv_cells_used": beat.cells_used if beat else 0,
        "kv_cells_retained": beat.cells_retained if beat else 0,
        "kv_cells_reserved": model.effective.cells if kinds else 0,
    }


def _model(state: State, model: ModelRecord) -> dict[str, Any]:
    hot_bytes = bytes_by_kind(state, model).get("kv", 0)
    counts, found = model.kv_counts, cells(state, model)
    tokens, reserved = found["kv_cells_used"] + found["kv_cells_retained"], found["kv_cells_reserved"]
    cache = state.ledger.caches.get(model.id)
    ram = counts if cache is not None else KvCounts()
    return {
        "model_name": model.id,
        "tiers": {
            "hot": {
                "sequences": counts.hot_sequences if hot_bytes else 0,
                "tokens": tokens,
                "mb": mib(hot_bytes * min(tokens, reserved) // reserved) if reserved else 0.0,
                "budget_mb": mib(hot_bytes),
            },
            "ram": {
                "sequences": ram.ram_sequences,
                "tokens": ram.ram_tokens,
                "mb": mib(cache.used_bytes) if cache is not None else 0.0,
                "budget_mb": mib(sum(cache.bytes.values())) if cache is not None else 0.0,
            },
            "disk": {
                "sequences": counts.disk_sequences,
                "tokens": counts.disk_tokens,
                "mb": mib(counts.disk_bytes),
                "budget_mb": _disk_budget_mb(state),
            },
        },
        **_counters([counts]),
        **found,
        "saved_sequences": model.kept.sequences if model.kept else 0,
        "saved_tokens": model.kept.tokens if model.kept else 0,
    }


def _counters(counts: Sequence[KvCounts]) -> dict[str, Any]:
    def total(name: str) -> Any:
        return sum(getattr(item, name) for item in counts)

    hits = {tier: total(f"hits_{tier}") for tier in ("hot", "ram", "disk")}
    prompts = sum(hits.values()) + total("misses")
    read, used = total("prefetched"), total("prefetched_used")
    return {
        "hits": hits,
        "misses": total("misses"),
        "hit_rate": round(sum(hits.values()) / prompts, 4) if prompts else None,
        "evicted": total("evicted"),
        "invalid": total("invalid"),
        "transfers": {
            name: {"mb": mib(total(size)), "seconds": round(total(seconds), 6)}
            for name, (size, seconds) in TRANSFERS.items()
        },
        "prefetches": {"read": read, "used": used, "wasted": max(0, read - used)},
    }
