"""The figures of the event `figures` of `/events`, as a function of the state: devices with their accounts, and what
each model has on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from inference.authority.handlers.queries import device_view, pressure_view
from inference.authority.handlers.running import replicas
from inference.authority.placement.ledger import Holding, Phase
from inference.authority.pressure.levels import Level, Use
from inference.authority.state import ModelRecord, State
from inference.devices.device import Reading
from inference.protocol import ModelState

_BLOCKS = ("weights", "kv", "compute", "other")
_LOADING = (ModelState.LOADING, ModelState.RESTORING)


def live_figures(state: State, now: float) -> dict[str, Any]:
    """The figures of all devices, and of the models with a worker, waiting requests or counted prompts."""
    blocks = {model.id: _blocks(state, model) for model in state.models.values()}
    uses = pressure_view.levels(state, now)
    shown = [reading for reading in device_view.readings(state, now) if reading.id in uses]
    levels = asdict(pressure_view.bounds_of(state))
    models = (model for model in state.models.values() if replicas.first_of(state, model) is model)
    return {
        "devices": [_device(state, reading, *uses[reading.id], levels, blocks) for reading in shown],
        "models": {model.id: found for model in models if (found := _model(state, model, blocks)) is not None},
    }


def _blocks(state: State, model: ModelRecord) -> dict[str, dict[str, int]]:
    """The bytes that the worker of a model allocated, by device and kind."""
    worker = state.worker_of(model)
    if worker is None or worker.ready is None or model.state is ModelState.WARM:
        return {}
    found: dict[str, dict[str, int]] = {}
    for buffer in worker.ready.buffers:
        kinds = found.setdefault(buffer.device, dict.fromkeys(_BLOCKS, 0))
        kinds[buffer.kind if buffer.kind in kinds else "other"] += buffer.bytes
    return found


# --- devices ---------------------------------------------------------------------------------------------------------
def _device(
    state: State,
    reading: Reading,
    use: Use,
    level: Level,
    levels: Mapping[str, float],
    blocks: Mapping[str, Mapping[str, Mapping[str, int]]],
) -> dict[str, Any]:
    balance, account = state.ledger.balance(reading.id), state.ledger.accounts[state.ledger.account_of(reading.id)]
    by_model: dict[str, dict[str, int]] = {}
    warm: dict[str, int] = {}
    for holding in state.ledger.holdings.values():
        count = holding.bytes.get(reading.id, 0)
        if not count or holding.phase not in (Phase.RESERVED, Phase.RESIDENT):
            continue
        model = state.models.get(holding.owner)
        if model is not None and model.state is ModelState.WARM:
            warm[model.id] = warm.get(model.id, 0) + count
        else:
            _book(by_model, holding, count, blocks.get(holding.owner, {}).get(reading.id, {}))
    return {
        "id": reading.id,
        "name": reading.name,
        "kind": reading.kind,
        "state": str(reading.state),
        "reason": reading.note,
        "total_bytes": use.total_bytes,
        "used_bytes": use.used_bytes,
        "free_bytes": balance.free_bytes,
        "limit_bytes": balance.capacity_bytes,
        "usable_bytes": account.budget_bytes,
        "accounts": {
            "foreign": balance.foreign_bytes,
            "reserved": balance.reserved_bytes,
            "resident": balance.resident_bytes,
            "releasing": balance.releasing_bytes,
            "cached": balance.cached_bytes,
            "shortfall": balance.shortfall_bytes,
        },
        "by_model": by_model,
        "warm": warm,
        "pressure": str(level),
        "pressure_ratio": round(use.share, 4),
        "pressure_levels": levels,
    }


def _book(by_model: dict[str, dict[str, int]], holding: Holding, count: int, blocks: Mapping[str, int]) -> None:
    """Adds a holding to the row of its owner. The blocks of resident memory add up to it: what is booked beyond the
    allocated buffers counts as `other`.
    """
    row = by_model.setdefault(holding.owner, {"resident": 0, "reserved": 0, **dict.fromkeys(_BLOCKS, 0)})
    if holding.phase is Phase.RESERVED:
        row["reserved"] += count
        return
    row["resident"] += count
    left = row["resident"]
    for kind in _BLOCKS[:-1]:
        row[kind] = min(left, blocks.get(kind, 0))
        left -= row[kind]
    row["other"] = left


# --- models ----------------------------------------------------------------------------------------------------------
def _model(
    state: State, model: ModelRecord, blocks: Mapping[str, Mapping[str, Mapping[str, int]]]
) -> dict[str, Any] | None:
    """The figures of a model with all its replicas; None where there is nothing to show."""
    every = replicas.replicas_of(state, model)
    workers = [worker for item in every if (worker := state.worker_of(item)) is not None]
    hits = {tier: sum(getattr(item.kv_counts, f"hits_{tier}") for item in every) for tier in ("hot", "ram", "disk")}
    prompts = sum(hits.values()) + sum(item.kv_counts.misses for item in every)
    in_flight, queued = sum(map(state.in_flight, every)), sum(len(item.queue) for item in every)
    if not workers and not prompts and not queued:
        return None
    loading = [
        worker.progress for item in every if item.state in _LOADING and (worker := state.worker_of(item)) is not None
    ]
    beats = [worker.beat for worker in workers if worker.beat is not None]
    found: dict[str, dict[str, int]] = {}
    for item in every:
        for device, kinds in blocks[item.id].items():
            row = found.setdefault(device, dict.fromkeys(_BLOCKS, 0))
            for kind, count in kinds.items():
                row[kind] += count
    return {
        "in_flight": in_flight,
        "queued": queued,
        "progress": round(max(loading), 3) if loading else None,
        "generated_tokens": sum(beat.generated_tokens for beat in beats),
        "kv_hits": hits,
        "prefix_hit_ratio": round(sum(hits.values()) / prompts, 4) if prompts else None,
        "idle_deadline": _idle_deadline(state, every),
        "blocks": found,
    }


def _idle_deadline(state: State, every: list[ModelRecord]) -> float | None:
    """When the first of these models leaves if it stays idle, in Unix seconds; None if none will."""
    found = [
        replicas.last_used_at(state, item) + item.spec.idle_timeout + state.unix_offset
        for item in every
        if item.state is ModelState.READY and not state.in_flight(item) and not item.queue.waiters
        if not item.spec.pinned and math.isfinite(item.spec.idle_timeout)
    ]
    return round(min(found), 1) if found else None
