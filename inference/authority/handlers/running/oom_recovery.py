"""What `oom_policy` does when a model runs out of memory, and what is learned from it.

Its steps (`placement.smaller_settings`) are taken once, in order: other models clean up, the model gets smaller, it is
loaded on the CPU for a while. Each is recorded. Before them, a model that the plan refuses is changed as `fit` allows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from headgate.shared.units import format_bytes
from inference.authority.draft import Draft
from inference.authority.effects import CheckHeadrooms, LearnGoodEnd, LearnShortage, Short, TrimWorkers
from inference.authority.events import HeadroomChanged, ShortageLearned, Trimmed
from inference.authority.handlers.measuring.estimates import forget_estimates
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.queries.plan_inputs import fit_of
from inference.authority.handlers.running import endings
from inference.authority.handlers.running.worker_memory import reclaim, serving
from inference.authority.lifecycle import Action, Departure, Reason
from inference.authority.placement.plan import EvictionState, Refusal
from inference.authority.placement.smaller_settings import (
    REST_SECONDS,
    Reduction,
    Step,
    next_step,
    smaller_context,
    smaller_ubatch,
    steps_of,
)
from inference.authority.state import ModelRecord, State, TakenStep, WorkerRecord
from inference.devices.device import CPU
from inference.protocol import ExitCause, ModelState
from inference.settings import ModelSpec
from inference.workers.exit_cause import WorkerExit

HEADROOM_CHECK_SECONDS = 60.0
"""Interval of checks for decayed head-room."""
_OOM = (ExitCause.OOM_LOAD, ExitCause.OOM_COMPUTE)


# --- what plans are made with ----------------------------------------------------------------------------------------
def is_fallback(state: State, model: ModelRecord) -> bool:
    """Whether the model is on the CPU because accelerators had no room (`oom_policy: cpu`)."""
    worker, spec = state.worker_of(model), model.spec
    if worker is None or worker.by_hand or worker.placement.devices != (CPU,) or "cpu" not in spec.oom_policy:
        return False
    has_accelerators = any(item.id != CPU for item in state.devices.measured)
    return spec.gpu_layers != 0 and not state.settings.force_cpu_mode and has_accelerators


def can_reduce(model: ModelRecord, refusal: Refusal, now: float) -> bool:
    """Whether other settings or a cleanup are tried when the plan refuses the model."""
    if fit_of(model.spec).allows(refusal.fix):
        return True
    return bool(refusal.lacks) and _next(model, now)[1] not in (None, Step.CPU)


def falls_back(model: ModelRecord, now: float) -> bool:
    """Whether a plan may use the CPU if accelerators have no room, because it is the next step of the policy."""
    return model.reduced is None and _next(model, now)[1] is Step.CPU


def _next(model: ModelRecord, now: float, without: Collection[Step] = ()) -> tuple[Reduction, Step | None]:
    reduction = model.reduction if model.reduced is not None else model.reduction.rested(now)
    return next_step(reduction, steps_of(model.spec.oom_policy), now, without)


# --- refused by the plan ---------------------------------------------------------------------------------------------
def refused(draft: Draft, id: str, refusal: Refusal) -> bool:
    """Called when the plan refuses the model. True: its settings are changed or a step of the policy was taken, and the
    model is planned again.
    """
    model = draft.model(id)
    if fit_of(model.spec).allows(refusal.fix):
        _fit(draft, model, refusal.fix)
        return True
    if not refusal.lacks or not model.spec.oom_policy:
        restore_sizes(draft, id)
        return False
    if draft.state.is_estimating(model):
        return True
    on_host = any(lack.device == CPU for lack in refusal.lacks)
    without = (Step.CPU,) if on_host or falls_back(model, draft.now) else ()
    if not _step_down(draft, id, refusal.fix, without, on_host=on_host):
        return False
    draft.plan()
    return True


def _fit(draft: Draft, model: ModelRecord, fix: Mapping[str, Any]) -> None:
    """Uses a verified change that the configuration allows, for the next load."""
    changes = ", ".join(f"{key}: {value}" for key, value in fix.items())
    draft.warning("%s does not fit as configured and is loaded with %s", model.id, changes)
    reduction = replace(model.reduction, rests_until=draft.now + REST_SECONDS)
    steps = (*model.steps, TakenStep("fit", fix))
    draft.set_model(model.id, reduced=replace(model.effective, **fix), reduction=reduction, steps=steps)
    draft.plan()


# --- allocation failures of workers -----------------------------------------------------------------------------------
def ran_out(exit: WorkerExit) -> bool:
    """Whether a worker ended because memory ran out."""
    return exit.cause in _OOM or exit.starved


def learn(draft: Draft, worker: WorkerRecord, exit: WorkerExit) -> None:
    """Learns that a worker ran out of memory, on every device that may have been short."""
    budgets = device_view.budgets_of(draft.state, draft.now)
    short = tuple(
        Short(device, worker.placement.need.get(device.id, 0), budgets.get(device.id, 0))
        for device in device_view.named(draft.state, _short(worker, exit), draft.now)
    )
    draft.emit(LearnShortage(worker.id, _settings_of(draft, worker), exit, short, _computing(exit)))


def _settings_of(draft: Draft, worker: WorkerRecord) -> ModelSpec:
    """The settings of a worker: the current ones of its model, unless it was loaded with others."""
    current = draft.model(worker.model).effective
    return current if set(current.changed(worker.spec)) <= ModelSpec.SOFT else worker.spec


def ended_without_shortage(draft: Draft, worker: WorkerRecord, exit: WorkerExit) -> None:
    """A worker ended without an out-of-memory error."""
    if exit.cause is ExitCause.REQUESTED and exit.was_ready:
        names = dict.fromkeys([*worker.placement.devices, CPU])
        devices = device_view.named(draft.state, names, draft.now)
        draft.emit(LearnGoodEnd(_settings_of(draft, worker), tuple(devices)))
    draft.set_model(worker.model, shortages=())
    model = draft.model(worker.model)
    is_moved = model.target is not None or not draft.is_current(worker)  # the next worker has the same sizes
    if not is_moved and not model.reduction.rest(draft.now):
        restore_sizes(draft, model.id)


def after_shortage(draft: Draft, worker: WorkerRecord, event: ShortageLearned) -> bool:
    """A worker ran out of memory. True: the load is repeated at once with other settings or devices."""
    model = draft.model(worker.model)
    computing = _computing(event.exit)
    settings = _settings_of(draft, worker)
    is_replaced = settings != model.effective
    draft.set_model(model.id, shortages=() if computing or is_replaced else event.shortages)
    forget_estimates(draft, {settings})
    if model.target is not None or model.removed or is_replaced:
        return False
    short = _short(worker, event.exit)
    if not model.spec.oom_policy:
        return False
    without = [Step.CLEAN] if computing else []
    without += [Step.CPU] if CPU in short else []
    has_step = _step_down(draft, model.id, {}, without, on_host=CPU in short)
    return has_step and model.state is ModelState.LOADING


def _short(worker: WorkerRecord, exit: WorkerExit) -> tuple[str, ...]:
    return (CPU,) if exit.starved else worker.placement.devices


def _computing(exit: WorkerExit) -> bool:
    return exit.cause is ExitCause.OOM_COMPUTE or (exit.starved and exit.was_ready)


# --- time ------------------------------------------------------------------------------------------------------------
def tick(draft: Draft) -> None:
    """Restores configured sizes of models after their rest period, and lets learned head-room decay."""
    for model in draft.state.models.values():
        is_changed = model.reduced is not None or model.steps
        is_away = model.worker is None and model.target is None
        if is_changed and is_away and not model.reduction.rest(draft.now):
            restore_sizes(draft, model.id)
    if draft.now >= draft.state.headroom_check_at:
        draft.set(headroom_check_at=draft.now + HEADROOM_CHECK_SECONDS)
        check_headrooms(draft)


def check_headrooms(draft: Draft) -> None:
    """Begins a check for decayed head-room."""
    found = {item.id: item for item in device_view.readings(draft.state, draft.now)}
    planned = tuple(
        (model.effective, found[name], count)
        for model in draft.state.models.values()
        if model.worker is None
        for estimate in draft.state.estimates_of(model.effective).values()
        for name, count in estimate.headroom_bytes.items()
        if name in found
    )
    if planned:
        draft.emit(CheckHeadrooms(planned))


def headroom_changed(draft: Draft, event: HeadroomChanged) -> None:
    """The head-room of models has decayed: they are measured again."""
    for spec in event.specs:
        forget_estimates(draft, {spec})
        model = draft.state.models.get(spec.id)
        if model is not None and model.effective == spec and model.worker is None:
            draft.set(to_measure=(*draft.state.to_measure, spec.id))
    draft.changed()
    draft.plan()


def restore_sizes(draft: Draft, id: str) -> None:
    """Restores the configured sizes for the next load."""
    model = draft.model(id)
    if model.steps:
        draft.set_model(id, steps=())
    if model.reduced is not None:
        draft.set_model(id, reduced=None)
        draft.plan()


# --- what the policies do --------------------------------------------------------------------------------------------
def _step_down(draft: Draft, id: str, fix: Mapping[str, Any], without: Collection[Step], *, on_host: bool) -> bool:
    """Takes the next step with an effect; False if none is left, and then restores the configured sizes."""
    model = draft.model(id)
    while True:
        reduction, step = _next(model, draft.now, without)
        model = draft.set_model(id, reduction=reduction)
        if step is None:
            restore_sizes(draft, id)
            return False
        if step is Step.CPU:
            draft.set_model(
                id, reduced=None, on_cpu_until=draft.now + REST_SECONDS, steps=(*model.steps, TakenStep("cpu"))
            )
            draft.count("alloc_retries")
            draft.warning("%s is loaded on the CPU: no memory on its accelerators", id)
            return True
        if step is Step.CLEAN:
            draft.set_model(id, steps=(*model.steps, TakenStep("cleanup")))
            draft.warning("out of memory for %s: dropping cached prefixes of all models", id)
            draft.set_model(id, cleaning=True, cleans_host=on_host)
            draft.emit(TrimWorkers(id, serving(draft.state)))
            return True
        if smaller := _smaller(model.effective, step, fix):
            reduced = replace(model.effective, **smaller)
            draft.set_model(id, reduced=reduced, steps=(*model.steps, TakenStep("reduce", smaller)))
            draft.count("alloc_retries")
            draft.warning("%s is reduced to fit: %s", id, ", ".join(model.spec.changed(reduced)))
            return True


def cleaned(draft: Draft, event: Trimmed) -> None:
    """Other models have dropped retained prefixes: the model is planned again."""
    model = draft.state.models.get(str(event.job))
    freed = event.freed_bytes + reclaim(draft, event.bytes)
    if model is None or not model.cleaning:
        return
    if model.cleans_host:
        for other in list(draft.state.models.values()):
            if draft.state.eviction_state(other, draft.now) is EvictionState.WARM:
                gone = Departure(Reason.MEMORY_WANTED, Action.UNLOAD, (f"{model.id} lacks host memory",))
                endings.end(draft, other.id, gone)
    draft.info("out of memory for %s: dropping cached prefixes released %s", model.id, format_bytes(freed))
    draft.set_model(model.id, cleaning=False)
    draft.plan()


def _smaller(spec: ModelSpec, step: Step, fix: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that `step` changes; empty if they are at their minimum.

    The planner's nearest fix is used instead of half the pool or context, unless it moves parts of the model to the
    CPU, which needs `fit` or the step `cpu`.
    """
    if step is Step.UBATCH:
        ubatch = smaller_ubatch(spec.ubatch)
        return {} if ubatch is None else {"ubatch": ubatch}
    if kept := {name: value for name, value in fix.items() if name not in ("gpu_layers", "experts")}:
        return kept
    if spec.kv_cells is not None and spec.kv_cells > spec.context_length:
        return {"kv_cells": max(spec.context_length, spec.kv_cells // 2)}
    context = smaller_context(spec.context_length)
    if context is None:
        return {}
    return {"context_length": context} | ({} if spec.kv_cells is None else {"kv_cells": context})
