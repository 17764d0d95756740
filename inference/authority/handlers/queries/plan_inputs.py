"""Converts records of models into inputs of the planner, and its refusals into errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from headgate.shared.units import format_bytes
from inference.authority.handlers.queries.device_view import candidates, closed_to, lost_for, readings
from inference.authority.lifecycle import ACCEPTING
from inference.authority.placement.ledger import Phase
from inference.authority.placement.plan import EvictionState, Held, Option, Placement, Refusal, Request
from inference.authority.placement.smaller_settings import Fit, FitStep
from inference.authority.placement.spread import Spread
from inference.authority.placement.turns import Resident
from inference.authority.state import State, WorkerRecord
from inference.devices.device import CPU, Reading, grants_of
from inference.errors import DeviceLost, InferenceError, MemoryLimitExceededError
from inference.estimate.layers import layers_of
from inference.estimate.model_estimate import Estimate, parameters_of
from inference.protocol import ModelState
from inference.settings import ModelSpec
from inference.worker_link import Grant, KvTiers, Ready

ENGINE_QUEUE = 512
"""Requests that may wait in a worker."""
TOLERANCE_BYTES = 8 * 2**20
"""Tolerance per buffer: llama.cpp's log rounds to 0.01 MiB and pads small buffers."""


def fit_of(spec: ModelSpec) -> Fit:
    """The changes with which the model may be loaded if it does not fit as configured."""
    steps = [step for step in FitStep if spec.fit in (step, "auto")]
    if spec.experts == "auto" and FitStep.EXPERTS not in steps:
        steps.append(FitStep.EXPERTS)
    return Fit(tuple(steps), spec.min_context)


def request_for(state: State, spec: ModelSpec, devices: Sequence[Reading], *, divide: bool = True) -> Request | None:
    """The request to the planner for a model with these settings; None while an estimate is missing.

    Without `divide`, only measured divisions are possible.
    """
    known = state.estimates_of(spec)
    if any(device.id not in known for device in devices):
        return None
    has_accelerator = any(device.id != CPU for device in devices)
    options = [
        Option(device.id, known[device.id].need, fallback=has_accelerator and device.id == CPU) for device in devices
    ]
    ids = {device.id for device in devices}
    splits = [item for item in known.values() if item.counts and ids.issuperset(item.counts)]
    options += [Option(next(iter(item.counts)), item.need, layers=item.counts) for item in splits]
    accelerators = [device for device in devices if device.id != CPU]
    spread = _spread(spec, known, accelerators, splits, divide=divide) if devices else None
    return Request(spec.id, tuple(options), spec.dedicated, spread, split_mode=spec.split_mode)


def _spread(
    spec: ModelSpec,
    estimates: Mapping[str, Estimate],
    accelerators: Sequence[Reading],
    splits: Sequence[Estimate],
    *,
    divide: bool,
) -> Spread | None:
    """The layers of the model, calibrated with the estimates on one device and with measured splits."""
    accelerator_ids = tuple(device.id for device in accelerators)
    first = accelerator_ids[0] if accelerator_ids else CPU
    measured = estimates[first]
    parameters = parameters_of(spec, first)
    layers = layers_of(parameters, measured.parts, accelerator_ids[0] if accelerator_ids else None, measured.sizes)
    if layers is None:
        return None
    layers = replace(layers, by_tensor=spec.split_mode == "tensor")
    overhead = measured.beyond_parts
    for name in accelerator_ids:
        overhead[name] = estimates[name].beyond_parts.get(name, 0)
    known = dict(overhead)
    for item in splits:
        modelled = layers.need(item.counts, known)
        for name, count in item.need.items():
            overhead[name] = max(overhead.get(name, 0), known.get(name, 0) + count - modelled[name])
    obstacle = next((why for name in accelerator_ids if (why := estimates[name].split_problem)), "")
    if spec.split_mode == "tensor" and spec.lora:
        obstacle = obstacle or "llama.cpp does not divide LoRA adapters by tensor; set split_mode: layer"
    return Spread(layers, accelerator_ids, overhead, divide, obstacle)


# --- what is held now ------------------------------------------------------------------------------------------------
def held_models(state: State, now: float) -> list[Held]:
    """Every model that holds memory, and memory that is being released."""
    held = []
    current: set[str] = set()
    holdings = state.ledger.holdings
    for model in state.models.values():
        worker = state.worker_of(model)
        if worker is None or worker.holding not in holdings:
            continue
        current.add(worker.holding)
        held.append(
            Held(
                model.id,
                worker.holding,
                state.eviction_state(model, now),
                holdings[worker.holding].bytes,
                model.last_used_at,
                model.reload_again_seconds,
                model.spec.dedicated,
                model.state is ModelState.WARM,
            )
        )
    held += [
        Held(holding.owner, holding.id, EvictionState.LEAVING, holding.bytes, now)
        for holding in holdings.values()
        if holding.id not in current and holding.phase is Phase.RELEASING
    ]
    return held


def residents(state: State) -> dict[str, Resident]:
    """Every model that is ready or in use."""
    found = {}
    for model in state.models.values():
        worker = state.worker_of(model)
        if worker is not None and model.state in ACCEPTING:
            found[model.id] = Resident(worker.ready_at, model.spec.min_residency, model.reload_seconds)
    return found


def workers_on(state: State, device: str) -> list[WorkerRecord]:
    """The workers of models on a device."""
    found = (state.worker_of(model) for model in state.models.values())
    return [worker for worker in found if worker is not None and device in worker.placement.devices]


# --- orders and reports of workers -----------------------------------------------------------------------------------
def grant_for(spec: ModelSpec, devices: Sequence[Reading], placement: Placement, kv: KvTiers) -> Grant:
    """The grant for a worker; `devices` are those of the placement, in order."""
    return Grant(
        model_id=spec.id,
        path=str(spec.path),
        devices=grants_of(devices),
        gpu_layers=0 if devices[0].id == CPU else spec.gpu_layers,
        tensor_split=placement.tensor_split,
        split_mode=spec.split_mode,
        host_expert_layers=0 if devices[0].id == CPU else spec.host_expert_layers,
        context_length=spec.context_length,
        parallel=spec.parallel,
        kv_cells=spec.kv_cells,
        kv_type=spec.kv_type,
        batch=spec.batch,
        ubatch=spec.ubatch,
        threads=spec.threads,
        flash_attention=spec.flash_attention,
        swa_full=spec.swa_full,
        checkpoint_bytes=spec.kv_checkpoints,
        speculation=spec.speculation,
        kv=kv,
        lora=spec.lora,
        mmproj=spec.mmproj,
        draft=spec.draft,
        capabilities=spec.capabilities,
        queue_limit=ENGINE_QUEUE,
        reserved_bytes=dict(placement.need),
    )


def deviation(estimate: Estimate, ready: Ready) -> str | None:
    """How the allocations of a worker differ from the plan, or None.

    They may exceed the plan on a device by a tolerance only; less than half on an accelerator means that the rest is
    elsewhere.
    """
    allocated = dict.fromkeys(estimate.parts, 0)
    for buffer in ready.buffers:
        allocated[buffer.device] = allocated.get(buffer.device, 0) + buffer.bytes
    for name, count in allocated.items():
        parts = estimate.parts.get(name)
        planned = (parts.total_bytes if parts else 0) + estimate.draft_bytes.get(name, 0)
        slack = TOLERANCE_BYTES + estimate.overhead_bytes.get(name, 0) + planned // 10
        if count > planned + slack:
            return f"it allocated {format_bytes(count)} on {name} where {format_bytes(planned)} were planned"
        if name != CPU and count < planned // 2:
            return (
                f"it allocated {format_bytes(count)} on {name} where {format_bytes(planned)} were planned, so the "
                "rest is on another device"
            )
    return None


# --- errors ----------------------------------------------------------------------------------------------------------
def refusal_error(state: State, spec: ModelSpec, refusal: Refusal, now: float) -> InferenceError:
    """The error for a final refusal: with numbers, or with the missing accelerator."""
    found = readings(state, now)
    lost, seconds = lost_for(spec, found)
    if lost and not candidates(spec, found, state.settings):
        devices = [item.id for item in closed_to(spec, found)]
        return DeviceLost(
            f"the model {spec.id!r} cannot be loaded: {lost}", retry_after=seconds, details={"devices": devices}
        )
    return MemoryLimitExceededError(
        spec.id,
        refusal.lacks,
        reason=refusal.reason,
        fix=refusal.fix,
        undivided=refusal.undivided if refusal.lacks else "",
        lost=lost,
        retry_after=seconds,
    )
