"""Translates between the authority's records and the pure planner's words, and the planner's into a worker's grant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headgate.shared.units import format_bytes
from inference.core.fix import Scaling
from inference.core.ledger import Ledger, Phase
from inference.core.plan import Held, Option, Refusal, Request, Standing
from inference.devices.base import Reading
from inference.devices.cpu import CPU
from inference.environment import InferenceSettings
from inference.errors import Shortage
from inference.estimator import Estimate
from inference.model import Model
from inference.protocol import DeviceState
from inference.settings import ModelSpec
from inference.worker.link import DeviceGrant, Grant, Ready

TOLERANCE_BYTES = 8 * 2**20
"""llama.cpp's log rounds each buffer to 0.01 MiB, and pads small ones."""


def candidates(spec: ModelSpec, readings: Sequence[Reading], settings: InferenceSettings) -> tuple[Reading, ...]:
    """The devices `spec` may be planned for: its own, then any accelerator, the CPU where there is none or it is asked.

    An accelerator that was there at the start and is lost now never turns into CPU: the result is empty then.
    """
    accelerators = [reading for reading in readings if reading.id != CPU]
    cpu = tuple(reading for reading in readings if reading.id == CPU)
    if settings.force_cpu_mode or spec.gpu_layers == 0 or not accelerators:
        return cpu
    allowed = [
        reading
        for index, reading in enumerate(accelerators)
        if reading.state in (DeviceState.HEALTHY, DeviceState.SUSPECT) and spec.gpu_index in (None, index)
    ]
    return (*allowed, *(cpu if spec.oom_policy == "cpu" else ()))


def request_for(model: Model, devices: Sequence[Reading]) -> Request | None:
    """What the planner is asked; None while an estimate is missing."""
    if any(device.id not in model.estimates for device in devices):
        return None
    spec = model.effective
    has_accelerator = any(device.id != CPU for device in devices)
    options = tuple(
        Option(device.id, model.estimates[device.id].need, fallback=has_accelerator and device.id == CPU)
        for device in devices
    )
    scaling = None
    if devices:
        estimate = model.estimates[devices[0].id]
        parts = estimate.parts.get(devices[0].id)
        if parts is not None:
            mask_bytes = min(parts.compute_bytes, spec.context_length * spec.parallel * spec.ubatch * 2)
            scaling = Scaling(
                devices[0].id, parts.kv_bytes, mask_bytes, spec.context_length, spec.parallel, spec.kv_type
            )
    return Request(model.id, options, spec.dedicated, scaling)


def held_models(models: Iterable[Model], ledger: Ledger, now: float) -> list[Held]:
    """Every model that holds memory, and memory on its way back whose model is gone already."""
    held = []
    current: set[str] = set()
    for model in models:
        if model.running is None or model.running.holding not in ledger.holdings:
            continue
        current.add(model.running.holding)
        held.append(
            Held(
                model.id,
                model.running.holding,
                model.standing(now),
                ledger.holdings[model.running.holding].bytes,
                model.last_used_at,
                model.reload_seconds,
                model.spec.dedicated,
            )
        )
    held += [
        Held(holding.owner, holding.id, Standing.LEAVING, holding.bytes, now)
        for holding in ledger.holdings.values()
        if holding.id not in current and holding.phase is Phase.RELEASING
    ]
    return held


def reduced(spec: ModelSpec, fix: Mapping[str, Any]) -> ModelSpec:
    """`spec` with a quarter of its physical batch and the planner's nearest fix."""
    return replace(spec, ubatch=max(32, spec.ubatch // 4), **fix)


def grant_for(spec: ModelSpec, device: Reading, need: Mapping[str, int], queue_limit: int) -> Grant:
    """What the worker is told to load, and where."""
    on_cpu = device.id == CPU
    return Grant(
        model_id=spec.id,
        path=str(spec.path),
        devices=(DeviceGrant(device.id, "cpu" if on_cpu else "gpu", device.ggml_name, device.rpc_endpoint),),
        gpu_layers=0 if on_cpu else spec.gpu_layers,
        context_length=spec.context_length,
        parallel=spec.parallel,
        kv_type=spec.kv_type,
        batch=spec.batch,
        ubatch=spec.ubatch,
        threads=spec.threads,
        flash_attention=spec.flash_attention,
        lora=spec.lora,
        mmproj=spec.mmproj,
        capabilities=spec.capabilities,
        queue_limit=queue_limit,
        reserved_bytes=dict(need),
    )


def shortages_of(refusal: Refusal) -> list[Shortage]:
    """The planner's lacks as the numbers of an error."""
    return [Shortage(lack.device, lack.need_bytes, lack.room_bytes, lack.bound) for lack in refusal.lacks]


def excess(estimate: Estimate, device: Reading, ready: Ready) -> str | None:
    """Why what a worker allocated is not what was planned, or None: more than planned, or not where it was planned."""
    allocated: dict[str, int] = {}
    for buffer in ready.buffers:
        allocated[buffer.device] = allocated.get(buffer.device, 0) + buffer.bytes
    for name, count in allocated.items():
        parts = estimate.parts.get(name)
        planned = parts.total_bytes if parts else 0
        slack = TOLERANCE_BYTES + estimate.overhead_bytes.get(name, 0) + planned // 10
        if count > planned + slack:
            return f"it allocated {format_bytes(count)} on {name} where {format_bytes(planned)} were planned"
    planned_here = estimate.parts.get(device.id)
    if device.id != CPU and planned_here and allocated.get(device.id, 0) < planned_here.total_bytes // 2:
        return (
            f"it allocated {format_bytes(allocated.get(device.id, 0))} on {device.id} where "
            f"{format_bytes(planned_here.total_bytes)} were planned; the rest went elsewhere"
        )
    return None
