"""Translates between the authority's records and the pure planner's words, and the planner's into a worker's grant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headgate.shared.units import format_bytes
from inference.authority.device_health.health import USABLE
from inference.authority.placement.layers import layers_of
from inference.authority.placement.ledger import Ledger, Phase
from inference.authority.placement.plan import Held, Option, Placement, Refusal, Request, Standing
from inference.authority.placement.spread import Spread
from inference.authority.placement.turns import Resident
from inference.devices.device import Reading
from inference.devices.host import CPU
from inference.environment_settings import InferenceSettings
from inference.errors import DeviceLost, InferenceError, MemoryLimitExceededError, Shortage
from inference.estimate.estimator import Estimate, parameters_of
from inference.model import Model
from inference.protocol import ModelState
from inference.settings import ModelSpec
from inference.workers.device_pinning import grants_of
from inference.workers.worker_link import Grant, Ready

ENGINE_QUEUE = 512
"""Requests that may wait in a worker."""
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
        if reading.state in USABLE and spec.gpu_index in (None, index)
    ]
    return (*allowed, *(cpu if spec.oom_policy == "cpu" else ()))


def closed_to(spec: ModelSpec, readings: Sequence[Reading]) -> tuple[Reading, ...]:
    """The accelerators that `spec` might be planned for if they were usable."""
    if spec.gpu_layers == 0:
        return ()
    accelerators = [reading for reading in readings if reading.id != CPU]
    return tuple(
        reading
        for index, reading in enumerate(accelerators)
        if reading.state not in USABLE and spec.gpu_index in (None, index)
    )


def lost_for(spec: ModelSpec, readings: Sequence[Reading]) -> tuple[str, float | None]:
    """Which accelerators are missing to `spec` and why, empty for none; and the seconds until that may change."""
    closed = closed_to(spec, readings)
    waits = [reading.verdict_seconds for reading in closed if reading.verdict_seconds is not None]
    said = ", ".join(f"{item.id} is {item.state}" + (f" ({item.note})" if item.note else "") for item in closed)
    return said, max(1.0, min(waits)) if waits else None


def placement_key(devices: Sequence[str], counts: Sequence[float] = ()) -> str:
    """The key of an estimate among a model's: the device, or the devices and how many layers each takes."""
    return "+".join(f"{name}:{count:g}" for name, count in zip(devices, counts, strict=True)) if counts else devices[0]


def estimate_of(model: Model, placement: Placement) -> Estimate:
    """What was measured for this placement."""
    return model.estimates[placement_key(placement.devices, placement.tensor_split)]


def request_for(model: Model, devices: Sequence[Reading], *, divide: bool = True) -> Request | None:
    """What the planner is asked; None while an estimate is missing.

    Without `divide` it is not told how the layers could be divided otherwise than measured already.
    """
    if any(device.id not in model.estimates for device in devices):
        return None
    spec = model.effective
    has_accelerator = any(device.id != CPU for device in devices)
    options = [
        Option(device.id, model.estimates[device.id].need, fallback=has_accelerator and device.id == CPU)
        for device in devices
    ]
    here = {device.id for device in devices}
    splits = [item for item in model.estimates.values() if item.counts and here.issuperset(item.counts)]
    options += [Option(next(iter(item.counts)), item.need, layers=item.counts) for item in splits]
    accelerators = [device for device in devices if device.id != CPU]
    spread = _spread(model, accelerators, splits, divide=divide) if devices else None
    return Request(model.id, tuple(options), spec.dedicated, spread)


def _spread(
    model: Model, accelerators: Sequence[Reading], splits: Sequence[Estimate], *, divide: bool
) -> Spread | None:
    """The layers of the model, calibrated by what one device needs and by the splits that were measured."""
    over = tuple(device.id for device in accelerators)
    first = over[0] if over else CPU
    measured = model.estimates[first]
    parameters = parameters_of(model.effective, accelerators[0] if over else Reading(CPU, CPU, "", 0, 0, 0))
    layers = layers_of(parameters, measured.parts, over[0] if over else None, measured.sizes)
    if layers is None:
        return None
    overhead = dict(measured.overhead_bytes)
    for name in over:
        overhead[name] = model.estimates[name].overhead_bytes.get(name, 0)
    known = dict(overhead)
    for item in splits:
        modelled = layers.need(item.counts, known)
        for name, count in item.need.items():
            overhead[name] = max(overhead.get(name, 0), known.get(name, 0) + count - modelled[name])
    return Spread(layers, over, overhead, divide)


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
                model.comeback_seconds,
                model.spec.dedicated,
            )
        )
    held += [
        Held(holding.owner, holding.id, Standing.LEAVING, holding.bytes, now)
        for holding in ledger.holdings.values()
        if holding.id not in current and holding.phase is Phase.RELEASING
    ]
    return held


def residents(models: Iterable[Model]) -> dict[str, Resident]:
    """Every model whose turn is running: it is ready or in use."""
    return {
        model.id: Resident(model.running.ready_at, model.spec.min_residency, model.reload_seconds)
        for model in models
        if model.running is not None and model.state in (ModelState.READY, ModelState.BUSY)
    }


def grant_for(spec: ModelSpec, devices: Sequence[Reading], placement: Placement) -> Grant:
    """What the worker is told to load, and where: `devices` are the placement's, in its order."""
    return Grant(
        model_id=spec.id,
        path=str(spec.path),
        devices=grants_of(devices),
        gpu_layers=0 if devices[0].id == CPU else spec.gpu_layers,
        tensor_split=placement.tensor_split,
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
        queue_limit=ENGINE_QUEUE,
        reserved_bytes=dict(placement.need),
    )


def shortages_of(refusal: Refusal) -> list[Shortage]:
    """The planner's lacks as the numbers of an error."""
    return [Shortage(lack.device, lack.need_bytes, lack.room_bytes, lack.bound) for lack in refusal.lacks]


def error_of(
    model: Model, refusal: Refusal, readings: Sequence[Reading], settings: InferenceSettings
) -> InferenceError:
    """What those are told whose model is refused for good: numbers, or which accelerator is gone."""
    lost, seconds = lost_for(model.effective, readings)
    if lost and not candidates(model.effective, readings, settings):
        devices = [reading.id for reading in closed_to(model.effective, readings)]
        return DeviceLost(
            f"the model {model.id!r} cannot be loaded: {lost}", retry_after=seconds, details={"devices": devices}
        )
    return MemoryLimitExceededError(
        model.id, shortages_of(refusal), reason=refusal.reason, fix=refusal.fix, lost=lost, retry_after=seconds
    )


def excess(estimate: Estimate, ready: Ready) -> str | None:
    """Why what a worker allocated is not what was planned, or None.

    On no device may it be more than planned; on an accelerator less than half means that the rest went elsewhere.
    """
    allocated = dict.fromkeys(estimate.parts, 0)
    for buffer in ready.buffers:
        allocated[buffer.device] = allocated.get(buffer.device, 0) + buffer.bytes
    for name, count in allocated.items():
        parts = estimate.parts.get(name)
        planned = parts.total_bytes if parts else 0
        slack = TOLERANCE_BYTES + estimate.overhead_bytes.get(name, 0) + planned // 10
        if count > planned + slack:
            return f"it allocated {format_bytes(count)} on {name} where {format_bytes(planned)} were planned"
        if name != CPU and count < planned // 2:
            return (
                f"it allocated {format_bytes(count)} on {name} where {format_bytes(planned)} were planned; the rest "
                "went elsewhere"
            )
    return None
