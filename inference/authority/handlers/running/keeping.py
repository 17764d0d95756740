"""Which models may be kept in the warm pool, by which mechanism, and with which memory."""

from __future__ import annotations

from collections.abc import Mapping

from inference.authority.device_health import USABLE
from inference.authority.handlers.queries import device_view
from inference.authority.lifecycle import ACCEPTING, Action
from inference.authority.placement.ledger import Ledger
from inference.authority.placement.plan import Option, Placement, Request
from inference.authority.retention import HOST, EvictedModel, Mechanism, Warm, kept_of
from inference.authority.state import ModelRecord, State, WorkerRecord
from inference.file_stamp import parts_of
from inference.protocol import ModelState

CPU_OVERHEAD_BYTES = 64 * 2**20
"""Host memory of a worker process: interpreter, libraries, HTTP app, threads (measured)."""
_S = ModelState


def obstacle(state: State, model: ModelRecord) -> str | None:
    """Why a loaded model cannot be kept, regardless of memory, or None."""
    worker = state.worker_of(model)
    if state.closing:
        return "the service stops"
    if not state.settings.enable_cpu_offload:
        return "INFERENCE_ENABLE_CPU_OFFLOAD is false"
    if not model.spec.warm:
        return "the model has warm: false"
    if model.removed or (worker is not None and worker.files != model.seen_files):
        return "its file or its configuration changed since the load"
    if mechanism(state, model) is Mechanism.RESIDENT and not state.linux:
        return "models on accelerators can be kept on Linux only"
    return None


def mechanism(state: State, model: ModelRecord) -> Mechanism:
    """How a model that is loaded, or warm, is kept."""
    if model.kept is not None:
        return model.kept.mechanism
    worker = state.worker_of(model)
    if worker is not None and can_suspend(state, worker):
        return Mechanism.CHECKPOINT
    on_host = worker is None or set(worker.placement.devices) == {HOST}
    return Mechanism.STANDBY if on_host else Mechanism.RESIDENT


def can_suspend(state: State, worker: WorkerRecord) -> bool:
    """Whether the driver can suspend a worker: it is on one GPU with its own memory, of a kind that passed the test."""
    is_one = worker.placement.devices == (worker.device.id,)
    is_proven = state.devices.suspension.get(worker.device.kind, "it was not tested") is None
    return is_proven and is_one and not worker.device.unified


def action_of(state: State, model: ModelRecord) -> Action:
    """The action for a model that is evicted although no other model needs its memory."""
    return Action.UNLOAD if obstacle(state, model) else Action.OFFLOAD


def rest_of(state: State, worker: WorkerRecord) -> Mapping[str, int]:
    """The host memory of a worker in standby: its weights and overhead, without its llama.cpp context."""
    held = state.ledger.holdings[worker.holding].bytes.get(HOST, 0)
    weights = sum(item.bytes for item in worker.ready.buffers if item.kind == "weights") if worker.ready else 0
    overhead = worker.estimate.overhead_bytes.get(HOST, 0)
    return {HOST: min(held, weights + overhead)}


def kept_as(state: State, model: ModelRecord) -> Warm:
    """The memory and the saved time if a loaded model is kept, without stored sequences."""
    worker = state.worker_of(model)
    assert worker is not None
    how = mechanism(state, model)
    if how is Mechanism.CHECKPOINT:
        size = sum(state.ledger.holdings[worker.holding].bytes.values())
    elif how is Mechanism.RESIDENT:
        weights = model.seen_files[: len(parts_of(model.effective.path))]
        size = sum(count for _path, (count, *_rest) in weights) + CPU_OVERHEAD_BYTES
    else:
        size = rest_of(state, worker)[HOST]
    return _warm(model, size)


def _warm(model: ModelRecord, count_bytes: int) -> Warm:
    return Warm(model.id, count_bytes, model.reload_seconds - (model.restore_seconds or 0.0), model.last_used_at)


def kept_for(state: State, placement: Placement, now: float) -> frozenset[str]:
    """The models that are evicted for this placement and kept in the warm pool."""
    evicted = []
    for name in placement.evict:
        model = state.models[name]
        worker = state.worker_of(model)
        assert worker is not None
        may = model.state in ACCEPTING and not obstacle(state, model)
        evicted.append(EvictedModel(name, worker.holding, kept_as(state, model) if may else None))
    return kept_of(evicted, placement.need, state.ledger, now)


def droppable(state: State) -> list[Warm]:
    """The warm models that no request waits for."""
    return [
        _warm(model, model.kept.count_bytes)
        for model in state.models.values()
        if model.kept is not None and model.state is _S.WARM and not model.queue.waiters
    ]


def only_device_of(model: ModelRecord) -> str | None:
    """The device of a warm model that can be restored on one device only, else None."""
    kept = model.kept
    return None if kept is None or kept.mechanism is Mechanism.RESIDENT else kept.original_device


def why_not_restorable(state: State, model: ModelRecord, now: float) -> str | None:
    """Why the only device of a warm model is not usable, or None."""
    device = only_device_of(model)
    reading = None if device is None else device_view.reading(state, device, now)
    if device is None or (reading is not None and reading.state in USABLE):
        return None
    return f"{device} is {'not found' if reading is None else reading.state}"


def request_to_restore(state: State, model: ModelRecord, request: Request) -> Request:
    """The planner's request for a warm model.

    A suspended model, or one in standby, needs only the bytes that it gave up; a resident one needs those of a load.
    """
    worker = state.worker_of(model)
    assert worker is not None
    assert model.kept is not None
    if worker.suspended is not None:
        option = Option(model.kept.original_device, worker.suspended.need)
        return Request(request.model, (option,), request.dedicated)
    if model.kept.mechanism is not Mechanism.STANDBY:
        return request
    held = state.ledger.holdings[worker.holding].bytes
    there = next((option for option in request.options if option.device == HOST), None)
    if there is None:  # it may not come back onto the host: it is dropped and loaded elsewhere
        return request
    rest = {name: max(0, count - held.get(name, 0)) for name, count in there.need.items()}
    return Request(request.model, (Option(HOST, rest),), request.dedicated)


def ledger_to_restore(state: State, model: ModelRecord) -> Ledger:
    """The ledger for planning the restoration of a warm model, whose kept bytes become part of the load."""
    worker = state.worker_of(model)
    if worker is None or model.kept is None or model.kept.mechanism is not Mechanism.STANDBY:
        return state.ledger
    return state.ledger.set_exempt(worker.holding, exempt=False)
