"""Pressure checks of devices, and the actions of the relief policy.

A regular check runs every INFERENCE_PRESSURE_CHECK_INTERVAL_SECONDS with new readings. Additional checks follow a
growth of foreign use, a reservation, a higher level, and a refused load.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from headgate.shared.units import mib
from inference import worker_link
from inference.authority.draft import Draft
from inference.authority.effects import Instruct, Publish
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.queries.plan_inputs import held_models
from inference.authority.handlers.queries.pressure_view import bounds_of, levels, rules_of, uses
from inference.authority.handlers.running import departure
from inference.authority.handlers.watching import advisor
from inference.authority.lifecycle import ACCEPTING, Action, Reason
from inference.authority.pressure.levels import Level, Use, grew, updated_gauge, with_accepted_use
from inference.authority.pressure.relief import (
    RESTRICTION_TEXTS,
    DevicePressure,
    Leave,
    LimitSequences,
    ModelUse,
    PressureInput,
    Relief,
    step,
)
from inference.authority.state import DeviceSample, Sample, State
from inference.protocol import ModelState

MAX_SAMPLES = 1000
"""More than four hours at one check every 15 s."""
_S = ModelState


# --- the time of a check ---------------------------------------------------------------------------------------------
def begin(draft: Draft) -> None:
    """The first check, when the devices are known."""
    draft.set(pressure=replace(draft.state.pressure, checked_at=draft.now))
    check(draft, regular=False)
    _sample(draft)
    advisor.report(draft)


def tick(draft: Draft) -> None:
    """Begins a check that is due, or that a device needs."""
    pressure = draft.state.pressure
    due_at = pressure.checked_at + draft.state.settings.pressure_check_interval_seconds
    if draft.now >= due_at and pressure.awaited_read is None:
        needed = device_view.read(draft)
        draft.set(pressure=replace(pressure, checked_at=draft.now, awaited_read=needed))
    elif pressure.check_requested or any(_needs_check(draft.state, use) for use in uses(draft.state, draft.now)):
        check(draft, regular=False)


def read_done(draft: Draft, problem: str | None) -> None:
    """Runs the check that waited for a reading. If the reading failed, the check uses the previous one."""
    needed = draft.state.pressure.awaited_read
    if needed is None or draft.state.devices.reads_done < needed:
        return
    if problem is not None:
        draft.warning("the pressure check could not read the devices: %s", problem)
    draft.set(pressure=replace(draft.state.pressure, awaited_read=None))
    regular_check(draft)


def regular_check(draft: Draft) -> None:
    """A regular check with its sample and alerts."""
    check(draft, regular=True)
    _sample(draft)
    advisor.report(draft)
    draft.plan()


def _needs_check(state: State, use: Use) -> bool:
    gauge = state.pressure.devices.get(use.device, DevicePressure()).gauge
    higher = updated_gauge(gauge, use, bounds_of(state)).level > gauge.level
    return higher or grew(gauge, use) or use.ours_bytes > gauge.ours_bytes


def request_check(draft: Draft) -> None:
    """A load was refused: schedules one check."""
    draft.set(pressure=replace(draft.state.pressure, check_requested=True))


def accept_foreign_use(draft: Draft) -> None:
    """Called after a reservation: the current foreign use counts as planned."""
    found = {use.device: use for use in uses(draft.state, draft.now)}
    pressures = {
        device: replace(pressure, gauge=with_accepted_use(pressure.gauge, found[device]))
        if device in found and found[device].ours_bytes > pressure.gauge.ours_bytes
        else pressure
        for device, pressure in draft.state.pressure.devices.items()
    }
    draft.set(pressure=replace(draft.state.pressure, devices=pressures))


# --- the check itself ------------------------------------------------------------------------------------------------
def check(draft: Draft, *, regular: bool) -> None:
    """Checks the devices in the ledger and performs the actions."""
    draft.kv_grows = draft.kv_grows or regular  # of all checks, only regular ones let budgets for stored sequences grow
    state = draft.state
    before, found = state.pressure.devices, uses(state, draft.now)
    seen = PressureInput(found, _model_uses(state, draft.now), _wanted(state, draft.now))
    pressures, actions = step(before, seen, rules_of(state.settings), regular=regular)
    draft.set(pressure=replace(state.pressure, devices=pressures, check_requested=False))
    for use in found:
        _report(draft, use, before.get(use.device, DevicePressure()), pressures[use.device])
        short = draft.state.ledger.balance(use.device).shortfall_bytes
        advisor.note_foreign_use(draft, use, pressures[use.device].gauge.level, short)
    for action in actions:
        _carry_out(draft, action)


def _model_uses(state: State, now: float) -> list[ModelUse]:
    found = []
    for item in held_models(state, now):
        model = state.models.get(item.model)
        worker = None if model is None else state.worker_of(model)
        if model is not None:
            limit = worker.limit if worker is not None and worker.holding == item.holding else None
            idle = now - item.last_used_at
            found.append(ModelUse(item.model, item.eviction_state, item.bytes, idle, model.effective.parallel, limit))
    return found


def _wanted(state: State, now: float) -> Collection[str]:
    """The accounts of the devices that waiting models need."""
    waiting = [
        model
        for model in state.models.values()
        if model.queue.waiters and model.state in (_S.COLD, _S.WARM) and not state.is_estimating(model)
    ]
    devices = [item.id for model in waiting for item in device_view.devices_of(state, model.effective, now)]
    return {state.ledger.account_of(device) for device in devices}


def _report(draft: Draft, use: Use, before: DevicePressure, now: DevicePressure) -> None:
    if (before.gauge.level, before.restriction) == (now.gauge.level, now.restriction):
        return
    worsens = now.gauge.level > before.gauge.level or now.restriction > before.restriction
    if worsens and now.gauge.level >= Level.CRITICAL:
        write = draft.error
    elif now.restriction > before.restriction or (worsens and now.gauge.level >= Level.HIGH):
        write = draft.warning
    else:
        write = draft.info
    write(
        "%s is at %s (%s before): %s%s",
        use.device, now.gauge.level, before.gauge.level, use.numbers,
        "" if now.restriction == before.restriction else f"; {RESTRICTION_TEXTS[now.restriction]}",
    )  # fmt: skip
    data = {"device": use.device, "level": str(now.gauge.level), "restriction": now.restriction.name.lower()}
    draft.emit(Publish("pressure", data))
    draft.changed()


def _carry_out(draft: Draft, action: Relief) -> None:
    worker = draft.worker_of(action.model)
    if isinstance(action, Leave):
        how = Action.OFFLOAD if action.offload else Action.UNLOAD
        departure.leave(draft, action.model, Reason.PRESSURE, how, (action.reason,))
    elif worker is not None and worker.ready is None:
        return  # a warm model that requests wait for: its worker has no context yet
    elif worker is not None and isinstance(action, LimitSequences):
        draft.warning("%s admits at most %d sequences at a time: %s", action.model, action.sequences, action.reason)
        draft.set_worker(worker.id, limit=action.sequences)
        draft.emit(Instruct(worker.id, worker_link.Limit(action.sequences)))
    elif worker is not None:
        draft.info("%s drops its retained prefixes: %s", action.model, action.reason)
        draft.emit(Instruct(worker.id, worker_link.Forget()))


# --- history ---------------------------------------------------------------------------------------------------------
def _sample(draft: Draft) -> None:
    state = draft.state
    ready = [model for model in state.models.values() if model.state in ACCEPTING]
    slots = sum(model.effective.parallel for model in ready)
    workers = [worker for model in ready if (worker := state.worker_of(model)) is not None]
    active = sum(worker.beat.active for worker in workers if worker.beat is not None)
    sample = Sample(
        timestamp=round(draft.unix, 3),
        devices={device: _device(use, level) for device, (use, level) in levels(state, draft.now).items()},
        active_requests=sum(state.in_flight(model) for model in state.models.values()),
        queued_requests=sum(len(model.queue) for model in state.models.values()),
        pool_utilization=round(active / slots, 4) if slots else 0.0,
        models_loaded=len(ready),
        models_warm=sum(model.state is _S.WARM for model in state.models.values()),
    )
    history = (*state.pressure.history, sample)[-MAX_SAMPLES:]
    draft.set(pressure=replace(state.pressure, history=history))


def _device(use: Use, level: Level) -> DeviceSample:
    free = max(0, use.total_bytes - use.used_bytes)
    used_mb, free_mb, foreign_mb, ours_mb = (
        mib(count) for count in (use.used_bytes, free, use.foreign_bytes, use.ours_bytes)
    )
    return DeviceSample(used_mb, free_mb, foreign_mb, ours_mb, str(level))


def limits(state: State) -> Mapping[str, int]:
    """By model, the limit that its worker got: the sequences that it admits at a time."""
    held = ((model.id, state.worker_of(model)) for model in state.models.values())
    return {name: worker.limit for name, worker in held if worker is not None and worker.limit is not None}
