"""Collects the facts for alerts and derives the alerts; the planner checks whether a setting would help."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headgate.shared.units import GIB, MIB
from inference.authority.draft import Draft
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.queries.plan_inputs import held_models, request_for
from inference.authority.handlers.queries.pressure_view import bounds_of, level, restrictions, uses
from inference.authority.handlers.watching.predictions import Predictions
from inference.authority.lifecycle import Reason
from inference.authority.placement.ledger import Account, Ledger
from inference.authority.placement.plan import EvictionState, Held, Placement, Refusal, plan
from inference.authority.pressure.advice import (
    REJECTIONS_SECONDS,
    SWAP_SECONDS,
    Alert,
    Change,
    Kind,
    changes_of,
    foreign_use_alert,
    outgrown_alert,
    pressure_alert,
    queue_alert,
    swapping_alert,
    swaps,
)
from inference.authority.pressure.levels import Level, Use
from inference.authority.pressure.relief import Restriction
from inference.authority.state import ModelRecord, State
from inference.devices.device import CPU, Reading

LATELY_SECONDS = 600.0
"""How long refusals and full devices raise an alert."""
MAX_REFUSED = 10


# --- what happened ---------------------------------------------------------------------------------------------------
def note_foreign_use(draft: Draft, use: Use, now: Level, shortfall_bytes: int) -> None:
    """Records foreign use of a device that is too full at a check."""
    advice = draft.state.advice
    at, peak = advice.peaks.get(use.device, (-math.inf, 0))
    if now >= Level.CRITICAL or shortfall_bytes:
        kept = peak if draft.now - at < LATELY_SECONDS else 0
        peaks = {**advice.peaks, use.device: (draft.now, max(kept, use.foreign_bytes))}
        draft.set(advice=replace(advice, peaks=peaks))


def note_refusal(draft: Draft, model: str) -> None:
    """Records a final refusal of a load."""
    advice = draft.state.advice
    kept = {name: at for name, at in advice.refused.items() if name != model}
    names = [*kept.items(), (model, draft.now)][-MAX_REFUSED:]
    draft.set(advice=replace(advice, refused=dict(names)))


def report(draft: Draft) -> None:
    """Logs the beginning and the end of each alert."""
    before = draft.state.advice.logged
    found = {(str(alert.kind), alert.subject): alert for alert in alerts(draft.state, draft.now)}
    for key, alert in found.items():
        if key not in before or before[key].changes != alert.changes:
            draft.warning("alert %s: %s%s", alert.kind, alert.message, _recommended(alert.changes))
    for key in before.keys() - found.keys():
        draft.info("alert %s is over: %s", *key)
    if found != before:
        draft.set(advice=replace(draft.state.advice, logged=found))


# --- what follows ----------------------------------------------------------------------------------------------------
def alerts(state: State, now: float) -> tuple[Alert, ...]:
    """All current alerts; none without INFERENCE_ENABLE_MEMORY_ALERTS."""
    if not state.settings.enable_memory_alerts:
        return ()
    found = [*_devices(state, now), _swapping(state, now), *_misfits(state, now), *_outgrowths(state, now)]
    for priority, limit in state.settings.queue_limits.items():
        recent = [at for at, *full in state.advice.rejections if full == [priority, limit]]
        found.append(queue_alert(str(priority), limit, sum(now - at < REJECTIONS_SECONDS for at in recent)))
    return tuple(alert for alert in found if alert is not None)


def _outgrowths(state: State, now: float) -> Iterator[Alert | None]:
    """Growth of running workers, and for a while of ended ones."""
    for name, growth in state.advice.outgrown.items():
        model = state.models.get(name)
        if model is None:
            continue
        worker = state.worker_of(model)
        runs = worker is not None and worker.holding == growth.holding
        if runs or now - growth.at < LATELY_SECONDS:
            yield outgrown_alert(name, growth.bytes, growth.overhead_bytes, model.spec.memory_overhead)


def _devices(state: State, now: float) -> Iterator[Alert | None]:
    bounds = bounds_of(state)
    for use in uses(state, now):
        device = use.device
        yield pressure_alert(use, level(state, use), restrictions(state).get(device, Restriction.NONE))
        at, peak = state.advice.peaks.get(device, (-math.inf, 0))
        if now - at < LATELY_SECONDS:
            budget = state.ledger.accounts[device].budget_bytes
            yield foreign_use_alert(device, peak, budget, use.total_bytes, bounds, host=device == CPU)


def _swapping(state: State, now: float) -> Alert | None:
    since = now + state.unix_offset - SWAP_SECONDS
    records = [
        (record.model_name, record.wanted_by)
        for record in state.evictions
        if record.timestamp >= since and record.reason is Reason.MEMORY_WANTED
    ]
    models = state.models
    found = swaps([pair for pair in records if pair[0] in models and pair[1] in models])
    if found is None:
        return None
    names, count = found
    residency = min(models[name].spec.min_residency for name in names)
    for pair in (names, names[::-1]):
        fix = _fix_beside(state, models[pair[0]], models[pair[1]], now)
        if fix is None:
            return None  # they can be loaded together
        if fix:
            return swapping_alert(pair, count, residency, fix)
    return swapping_alert(names, count, residency, {})


def _fix_beside(state: State, first: ModelRecord, second: ModelRecord, now: float) -> Mapping[str, Any] | None:
    """Settings with which `second` would fit beside `first` after evictions; {} if there are none, None if it fits."""
    ledger, held = _staying(state, {first.id, second.id}, now)
    placed = _place(state, first, ledger, held, now)
    if not isinstance(placed, Placement):
        return {}
    ledger = ledger.reserve("advice", first.id, placed.need)
    beside = Held(first.id, "advice", EvictionState.FIXED, placed.need, now)
    decision = _place(state, second, ledger, [*held, beside], now)
    if isinstance(decision, Refusal):
        return decision.fix
    return None if decision else {}


def _staying(state: State, without: set[str], now: float) -> tuple[Ledger, list[Held]]:
    """The ledger with only the pinned and dedicated models that are not in `without`, and the list of these models."""
    held = held_models(state, now)
    stay = [item for item in held if item.eviction_state is EvictionState.FIXED and item.model not in without]
    kept = {item.holding for item in stay}
    return state.ledger.without(state.ledger.holdings.keys() - kept), stay


def _place(
    state: State, model: ModelRecord, ledger: Ledger, held: Sequence[Held], now: float
) -> Placement | Refusal | None:
    devices = device_view.devices_of(state, model.spec, now)
    request = request_for(state, model.effective, devices)
    if request is None:
        return None
    return plan(request, ledger, held, device_view.policy(state.settings, now))


def _misfits(state: State, now: float) -> Iterator[Alert]:
    predictions = Predictions(state, now) if state.advice.refused else None
    for name, at in state.advice.refused.items():
        model = state.models.get(name)
        if model is None or predictions is None or now - at >= LATELY_SECONDS:
            continue
        refusal = predictions.of(model)
        if isinstance(refusal, Refusal) and refusal.lacks and not refusal.waits_for:
            changes = changes_of(name, refusal.fix) or _allowing(state, model, refusal, now)
            yield Alert(Kind.REFUSED, name, f"{name} does not fit: {refusal.reason}", changes)


def _allowing(state: State, model: ModelRecord, refusal: Refusal, now: float) -> tuple[Change, ...]:
    """The limit of the service that would have to be raised for the model, verified with the planner."""
    ledger, held = _staying(state, {model.id}, now)
    short = {lack.device: lack.need_bytes - lack.free_bytes for lack in refusal.lacks}
    if ledger.limit_bytes is not None:
        limit = math.ceil((ledger.limit_bytes + max(short.values())) / GIB * 10) / 10
        raised = replace(ledger, limit_bytes=int(limit * GIB))
        if isinstance(_place(state, model, raised, held, now), Placement):
            return (Change("INFERENCE_MEMORY_LIMIT_GB", f"{limit:g}"),)
    for device, missing in short.items():
        reading = device_view.reading(state, device, now)
        if reading is None or reading.total_bytes <= 0:
            continue
        name, value = _larger_share(state, reading, ledger.accounts[device].budget_bytes + missing)
        if value > (1 if name.endswith("percent") else math.inf):
            continue
        allowance = device_view.allowance(reading, state.settings.model_copy(update={name: value}))
        if isinstance(_place(state, model, ledger.open(Account(device, *allowance)), held, now), Placement):
            return (Change(f"INFERENCE_{name.upper()}", f"{value:g}"),)
    return ()


def _larger_share(state: State, reading: Reading, wanted_bytes: int) -> tuple[str, float]:
    """The setting that limits Headgate's share of a device, and its value for `wanted_bytes`."""
    percent = math.ceil(wanted_bytes / reading.total_bytes * 100) / 100
    if reading.id == CPU:
        return "cpu_memory_max_percent", percent
    if state.settings.gpu_memory_limit_mb is not None:
        return "gpu_memory_limit_mb", math.ceil(wanted_bytes / MIB)
    return "gpu_memory_max_percent", percent


def _recommended(changes: Sequence[Change]) -> str:
    named = ", ".join(f"{change.setting}={change.value}" for change in changes)
    return f"; recommended: {named}" if named else ""
