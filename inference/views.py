"""How the authority's state looks from outside, and what settings mean in bytes; reads only, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inference.authority.placement.ledger import Balance
from inference.authority.placement.plan import Placement, Policy, Refusal
from inference.devices.device import Reading
from inference.devices.host import CPU
from inference.environment_settings import InferenceSettings
from inference.protocol import ModelState, ModelStatus
from inference.wishes import lost_for

if TYPE_CHECKING:
    from inference.authority.shell import Authority
    from inference.model import Model

MIB = 2**20


def allowance(reading: Reading, settings: InferenceSettings) -> tuple[int, int]:
    """(capacity, budget) of a device: what may be in use on it altogether, and what of that may be ours.

    Of an accelerator: min(total x INFERENCE_GPU_MEMORY_MAX_PERCENT, total - reserve), the reserve being
    INFERENCE_GPU_MEMORY_RESERVE_MB but at most 5 % of the device; INFERENCE_GPU_MEMORY_LIMIT_MB bounds our own share
    of that, because others use the device too. So does the percentage of host memory. A device whose size is unknown
    is bounded by INFERENCE_MEMORY_LIMIT_GB alone.
    """
    total = reading.total_bytes
    if total <= 0:
        unknown = settings.memory_limit_bytes or 16 * 2**30
        return unknown, unknown
    kept = min(int(settings.gpu_memory_reserve_mb * MIB), total // 20)
    if reading.id == CPU:
        return total - kept, int(total * settings.cpu_memory_max_percent)
    usable = min(int(total * settings.gpu_memory_max_percent), total - kept)
    if settings.gpu_memory_limit_mb is not None:
        return usable, min(usable, int(settings.gpu_memory_limit_mb * MIB))
    return usable, usable


def allowances(readings: Sequence[Reading], settings: InferenceSettings) -> Iterator[tuple[Reading, tuple[int, int]]]:
    """The allowance of every device with memory of its own.

    Where an accelerator has none, what it may use is host memory: the larger of the two budgets is the host's.
    """
    most = max((allowance(reading, settings)[1] for reading in readings if reading.unified), default=0)
    for reading in readings:
        if not reading.unified:
            capacity, budget = allowance(reading, settings)
            yield reading, (capacity, max(budget, min(most, capacity)) if reading.id == CPU else budget)


def policy(settings: InferenceSettings, now: float) -> Policy:
    """The limits of a decision made now."""
    return Policy(now, settings.max_models, settings.max_models_per_device)


def status(model: Model, authority: Authority, now: float) -> ModelStatus:
    """One model as `/v1/models`, `/events` and `ps` show it."""
    running = model.running
    estimate = next(iter(model.estimates.values()), None)
    is_known = running is not None and (running.ready is not None or model.state is ModelState.WARM)
    actual = sum(authority.ledger.owned_by(model.id).values()) if is_known else None
    fits, reason, rest = _fits(model, authority)
    if model.state is ModelState.FAILED:
        rest = model.retry_at - now
    return ModelStatus(
        id=model.id,
        state=model.state,
        aliases=model.spec.aliases,
        context_length=running.ready.context_length if running and running.ready else model.effective.context_length,
        parallel=model.effective.parallel,
        gpu_layers=model.effective.gpu_layers,
        devices=running.placement.devices if running else (),
        predicted_bytes=sum(estimate.need.values()) if estimate else None,
        actual_bytes=actual,
        in_flight=model.in_flight,
        queued=len(model.queue),
        idle_seconds=round(now - model.last_used_at, 3) if is_known and not model.in_flight else None,
        loads=model.loads,
        capabilities=model.spec.capabilities or model.capabilities,
        fits=fits,
        reason=reason,
        retry_after_seconds=None if rest is None else round(max(0.0, rest), 3),
        pid=running.worker.pid if running else None,
        headroom_bytes=sum(estimate.headroom_bytes.values()) if estimate else 0,
        reduced=model.spec.changed(model.effective),
        fallback=authority.shortages.is_fallback(model),
        load_seconds=_rounded(authority.waiting.load_seconds(model)),
        queue_seconds=_rounded(authority.waiting.queue_seconds(model)),
        answer_seconds=_rounded(model.pace.seconds),
        prefill_tokens_per_second=_rounded(authority.waiting.prefill_rate(model)),
    )


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 3)


def _fits(model: Model, authority: Authority) -> tuple[bool | None, str | None, float | None]:
    """Whether it fits, why not, and in how many seconds a lost device that it misses is tried again."""
    if model.running is not None and model.state is not ModelState.UNLOADING:
        return True, None, None
    outlook = authority.outlook.of(model)
    if not isinstance(outlook, Refusal):
        return outlook, model.failure, None
    if outlook.waits_for:
        return None, outlook.reason, None
    lost, seconds = lost_for(model.effective, authority.inventory.readings())
    return False, f"{outlook.reason}; {lost}" if lost else outlook.reason, seconds


_QUIET = {
    "idle_seconds": None,
    "in_flight": 0,
    "retry_after_seconds": None,
    "load_seconds": None,
    "queue_seconds": None,
    "answer_seconds": None,
    "prefill_tokens_per_second": None,
}


def differs(now: ModelStatus, told: ModelStatus | None) -> bool:
    """Whether listeners must hear of it: figures that move by themselves, and requests in flight, are no news."""
    if told is None:
        return True
    return replace(now, **_QUIET) != replace(told, **_QUIET)  # type: ignore[arg-type]


def balance_json(balance: Balance) -> dict[str, Any]:
    """An account as `/memory/stats` shows it."""
    return {
        "capacity_bytes": balance.capacity_bytes,
        "free_bytes": balance.free_bytes,
        "foreign_bytes": balance.foreign_bytes,
        "reserved_bytes": balance.reserved_bytes,
        "resident_bytes": balance.resident_bytes,
        "releasing_bytes": balance.releasing_bytes,
        "shortfall_bytes": balance.shortfall_bytes,
        "room_bytes": balance.room_bytes,
        "bound": balance.bound,
    }


def decision_json(decision: Placement | Refusal, lost: str = "") -> dict[str, Any]:
    """A decision as `/memory/plan` shows it; `lost` says which accelerators are missing, and why."""
    common = {"result": str(decision.result), "trace": list(decision.trace)}
    if isinstance(decision, Placement):
        return {
            **common,
            "allocation": str(decision.allocation),
            "device": decision.device,
            "devices": list(decision.devices),
            "tensor_split": list(decision.tensor_split),
            "need_bytes": dict(decision.need),
            "evict": list(decision.evict),
        }
    return {
        **common,
        "reason": f"{decision.reason}; {lost}" if lost else decision.reason,
        "waits_for": list(decision.waits_for),
        "fix": dict(decision.fix) or None,
        "short": [
            {
                "device": lack.device,
                "need_bytes": lack.need_bytes,
                "free_bytes": lack.room_bytes,
                "short_bytes": max(0, lack.need_bytes - lack.room_bytes),
                "bound": lack.bound,
            }
            for lack in decision.lacks
        ],
    }
