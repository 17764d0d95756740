"""The figures of `/memory/*` and `/devices`, as functions of the state.

Bytes of models and accounts come from the ledger, use of devices from readings, allocations from workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headgate.shared.units import format_bytes, mib
from inference.authority.device_health import USABLE
from inference.authority.handlers.queries import device_view, pressure_view
from inference.authority.handlers.watching import advisor
from inference.authority.lifecycle import SERVING, Action
from inference.authority.placement.ledger import Balance
from inference.authority.pressure.levels import Level, Use
from inference.authority.state import ModelRecord, State
from inference.authority.views import kv_figures
from inference.authority.views.inference_metrics import Metrics
from inference.devices.device import CPU, Reading
from inference.protocol import ExitCause, ModelState
from inference.workers.os_api import private_bytes


def percent(part: float, whole: float) -> float:
    """`part` of `whole`, 0 to 100; 0 of nothing."""
    return round(100 * part / whole, 2) if whole > 0 else 0.0


# --- devices ---------------------------------------------------------------------------------------------------------
def _device(reading: Reading, balance: Balance, use: Use, level: Level, usable_bytes: int) -> dict[str, Any]:
    """`used_mb`: use by all programs. `allocated_mb`: booked for models. `usable_bytes`: Headgate's share."""
    return {
        "name": reading.name,
        "kind": reading.kind,
        "state": str(reading.state),
        "total_mb": mib(use.total_bytes),
        "used_mb": mib(use.used_bytes),
        "free_mb": mib(max(0, use.total_bytes - use.used_bytes)),
        "used_percent": percent(use.used_bytes, use.total_bytes),
        "allocated_mb": mib(balance.ours_bytes),
        "foreign_mb": mib(balance.foreign_bytes),
        "reserved_mb": mib(balance.reserved_bytes),
        "resident_mb": mib(balance.resident_bytes),
        "releasing_mb": mib(balance.releasing_bytes),
        "cached_mb": mib(balance.cached_bytes),
        "shortfall_mb": mib(balance.shortfall_bytes),
        "budget_usable_mb": mib(usable_bytes),
        "room_mb": mib(balance.room_bytes),
        "bound": balance.bound,
        "pressure_level": str(level),
    }


def per_device(state: State, now: float) -> dict[str, dict[str, Any]]:
    """Every device by its id, accelerators first."""
    levels = pressure_view.levels(state, now)
    return {
        reading.id: _device(
            reading,
            state.ledger.balance(reading.id),
            *levels[reading.id],
            state.ledger.accounts[state.ledger.account_of(reading.id)].budget_bytes,
        )
        for reading in device_view.readings(state, now)
        if reading.id in levels
    }


def usable(state: State) -> str:
    """The usable memory of every device as text, for the log: `gpu-0 7.2 GiB, cpu 31.3 GiB`."""
    ledger = state.ledger
    parts = [f"{name} {format_bytes(account.budget_bytes)}" for name, account in ledger.accounts.items()]
    text = ", ".join(parts)
    return text if ledger.limit_bytes is None else f"{text}; {format_bytes(ledger.limit_bytes)} for all loaded models"


def _default_devices(devices: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The default devices of models: the accelerators, or the host if there are none."""
    return [figures for name, figures in devices.items() if name != CPU] or list(devices.values())


def _worst(levels: Iterable[str]) -> str:
    return str(max((Level[name.upper()] for name in levels), default=Level.LOW))


def _sum(devices: Iterable[Mapping[str, Any]], name: str) -> float:
    return round(sum(float(figures[name]) for figures in devices), 3)


# --- stats and health ------------------------------------------------------------------------------------------------
def stats(state: State, now: float) -> dict[str, Any]:
    """The totals of `/memory/stats`: of all accelerators, or of the host if there are none."""
    devices = per_device(state, now)
    default = _default_devices(devices)
    limit = state.ledger.limit_bytes
    usable = _sum(default, "budget_usable_mb")
    total, used = _sum(default, "total_mb"), _sum(default, "used_mb")
    host = devices.get(CPU, {})
    states = [model.state for model in state.models.values()]
    gone = state.departures
    alerts = advisor.alerts(state, now)
    return {
        "total_mb": total,
        "free_mb": _sum(default, "free_mb"),
        "used_mb": used,
        "used_percent": percent(used, total),
        "allocated_mb": _sum(default, "allocated_mb"),
        "limit_mb": None if limit is None else mib(limit),
        "budget_total_mb": total,
        "budget_usable_mb": usable if limit is None else min(usable, mib(limit)),
        "cpu_budget_total_mb": host.get("total_mb", 0.0),
        "cpu_budget_usable_mb": host.get("budget_usable_mb", 0.0),
        "cpu_used_mb": host.get("allocated_mb", 0.0),
        "models_loaded": sum(state in SERVING for state in states),
        "models_offloaded": states.count(ModelState.WARM),
        "pressure_level": _worst(figures["pressure_level"] for figures in devices.values()),
        "total_evictions": gone.total(),
        "total_offloads": gone[Action.OFFLOAD],
        "total_restorations": state.restorations,
        "total_unloads": gone[Action.UNLOAD],
        "gpu_available": any(name != CPU and figures["state"] in USABLE for name, figures in devices.items()),
        "per_device": devices,
        "alerts": [alert.to_json() for alert in alerts],
        "recommendations": [change for alert in alerts for change in alert.recommendations()],
    }


def health(state: State, now: float) -> dict[str, Any]:
    """The health of devices: false with an unusable device or from CRITICAL pressure on; `message` has the reason."""
    devices = per_device(state, now)
    ill = []
    for name, figures in devices.items():
        if figures["state"] not in USABLE:
            ill.append(f"{name} is {figures['state']}")
        elif Level[figures["pressure_level"].upper()] >= Level.CRITICAL:
            ill.append(
                f"{name} is at {figures['pressure_level']} pressure: {figures['used_mb']:.0f} MiB of "
                f"{figures['total_mb']:.0f} MiB are in use, {figures['foreign_mb']:.0f} MiB of it by other programs"
            )
    default = _default_devices(devices)
    return {
        "healthy": not ill,
        "pressure": _worst(figures["pressure_level"] for figures in devices.values()),
        "used_percent": percent(_sum(default, "used_mb"), _sum(default, "total_mb")),
        "message": "; ".join(ill) or "all devices are healthy",
        "devices": {
            name: {
                "state": figures["state"],
                "pressure": figures["pressure_level"],
                "used_percent": figures["used_percent"],
            }
            for name, figures in devices.items()
        },
    }


# --- models ----------------------------------------------------------------------------------------------------------
def location(state: State, model: ModelRecord) -> str:
    """Where the model's weights are: `disk`, `host` (warm), or the ids of its devices joined by `+`."""
    if model.state is ModelState.WARM:
        return "host"
    worker = state.worker_of(model)
    if worker is None:
        return "disk"
    return "+".join(sorted(set(worker.placement.need) - {CPU}) or [CPU])


def model(state: State, model: ModelRecord, now: float) -> dict[str, Any]:
    """One model of `/memory/models`. `observed`: all its bytes in the ledger; None before a load has ended."""
    held = state.ledger.owned_by(model.id)
    estimate = next(iter(state.estimates_of(model.effective).values()), None)
    worker, in_flight = state.worker_of(model), state.in_flight(model)
    ready = worker.ready if worker else None
    is_known = ready is not None or model.state is ModelState.WARM
    seen = bool(held) and is_known
    return {
        "model_name": model.id,
        "model_type": estimate.architecture if estimate else None,
        "quantization": estimate.quantization if estimate else None,
        "state": str(model.state),
        "location": location(state, model),
        "memory_mb": {
            "predicted": mib(sum(estimate.need.values())) if estimate else None,
            "observed": mib(sum(held.values())) if seen else None,
        },
        "devices_mb": {name: mib(count) for name, count in held.items()},
        "growth": {
            name: {"mb": mib(grown.bytes), "evidence": str(grown.evidence)}
            for name, grown in (worker.device_growth if worker else {}).items()
        },
        "idle_seconds": round(now - model.last_used_at, 3) if is_known and not in_flight else None,
        "use_count": model.uses,
        "ref_count": in_flight,
        "pinned": model.spec.pinned,
        "estimate": estimate.to_json() if estimate else None,
        "buffers": [
            {"device": buffer.device, "kind": buffer.kind, "bytes": buffer.bytes}
            for buffer in (ready.buffers if ready else ())
        ],
    }


def offloaded(state: State, now: float) -> list[dict[str, Any]]:
    """The warm models as `/memory/offloaded` shows them: bytes, Unix seconds, seconds."""
    unix = now + state.unix_offset
    return [
        {
            "model_key": model.id,
            "original_device": model.kept.original_device,
            "offload_time": model.kept.since,
            "seconds_offloaded": round(max(0.0, unix - model.kept.since), 3),
            "bytes": model.kept.count_bytes,
            "locked_bytes": model.kept.locked_bytes,
            "mechanism": str(model.kept.mechanism),
            "sequences": model.kept.sequences,
            "tokens": model.kept.tokens,
        }
        for model in state.models.values()
        if model.kept is not None
    ]


# --- fragmentation ---------------------------------------------------------------------------------------------------
def fragmentation(state: State, now: float, metrics: Metrics) -> dict[str, Any]:
    """Tracked and observed bytes, used and reserved cells, and the distribution of free memory over devices."""
    balances = device_view.balances(state, now)
    readings = [reading for reading in device_view.readings(state, now) if reading.id in balances]
    rooms = [balances[reading.id].room_bytes for reading in readings if reading.id != CPU]
    rooms = rooms or [balances[reading.id].room_bytes for reading in readings]
    return {
        "devices": {reading.id: _tracked(reading, balances[reading.id]) for reading in readings},
        "models": [_tracked_model(state, model) for model in state.models.values() if model.worker is not None],
        "room_mb": mib(sum(rooms)),
        "largest_room_mb": mib(max(rooms, default=0)),
        "fragmentation_percent": percent(sum(rooms) - max(rooms, default=0), sum(rooms)),
        "num_alloc_retries": metrics.total(metrics.alloc_retries),
        "num_ooms": metrics.total(metrics.exits, cause=(ExitCause.OOM_LOAD, ExitCause.OOM_COMPUTE)),
    }


def _tracked(reading: Reading, balance: Balance) -> dict[str, Any]:
    tracked = balance.ours_bytes + balance.foreign_bytes
    return {
        "tracked_mb": mib(balance.ours_bytes),
        "foreign_mb": mib(balance.foreign_bytes),
        "observed_mb": mib(reading.used_bytes),
        "difference_mb": mib(reading.used_bytes - tracked),
    }


def _tracked_model(state: State, model: ModelRecord) -> dict[str, Any]:
    worker = state.worker_of(model)
    assert worker is not None
    host = None if worker.pid is None else private_bytes(worker.pid)
    cells = kv_figures.cells(state, model)
    return {
        "model_name": model.id,
        "tracked_mb": mib(sum(state.ledger.owned_by(model.id).values())),
        "allocated_mb": mib(sum(buffer.bytes for buffer in worker.ready.buffers)) if worker.ready else None,
        "process_mb": None if host is None else mib(host),
        **cells,
    }
