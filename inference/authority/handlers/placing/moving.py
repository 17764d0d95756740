"""Moves a model to a device, and back if that fails.

The move is planned first; a refusal changes nothing. A model that fell back to the CPU moves to an accelerator with
enough free memory, while no request uses it; no other model is evicted for it.
"""

from __future__ import annotations

from dataclasses import replace

from inference.authority.device_health import USABLE
from inference.authority.draft import Draft
from inference.authority.effects import Answer, Refuse
from inference.authority.events import Move, Wanted
from inference.authority.handlers.measuring import estimates
from inference.authority.handlers.placing import decision
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.queries.pressure_view import allowed_devices
from inference.authority.handlers.running import departure, oom_recovery, replicas, request_events, tickets
from inference.authority.lifecycle import ACCEPTING, Reason
from inference.authority.pending_commands import DefragmentCommand, MoveCommand
from inference.authority.placement.plan import Placement, Refusal, Result
from inference.authority.placement.smaller_settings import REST_SECONDS
from inference.authority.state import CpuReturn, ModelRecord, Purpose, State, TicketRecord
from inference.devices.device import CPU, Reading
from inference.errors import DeviceLost, InferenceError, InvalidRequestError, MemoryLimitExceededError, ModelNotFound
from inference.protocol import ModelState, Priority
from inference.settings import ModelSpec

FALLBACK_CHECK_SECONDS = 5.0
"""Interval of checks for free memory on accelerators."""


def begin(draft: Draft, id: int, request: Move, *, returns_from_cpu: bool = False, parent: int | None = None) -> None:
    """Begins a move that an operator or the authority requested."""
    command = MoveCommand(
        request.model, request.device, request.seconds, returns_from_cpu=returns_from_cpu, parent=parent
    )
    draft.set_command(id, command)
    model = draft.state.models.get(request.model)
    if model is None or model.removed:
        _end(draft, id, command, ModelNotFound(request.model, sorted(draft.state.config.model_ids)))
        return
    if error := _unusable(draft.state, model, request.device, draft.now):
        _end(draft, id, command, error)
        return
    worker = draft.worker_of(model.id)
    if worker is not None and model.state in ACCEPTING and worker.placement.devices == (request.device,):
        _end(draft, id, command, None)
        return
    draft.plan()


def _unusable(state: State, model: ModelRecord, device: str, now: float) -> InvalidRequestError | None:
    """Why the model cannot be moved to this device, or None."""
    if model.target is not None:
        return InvalidRequestError(f"{model.id!r} is being moved to {model.target} already", param="device")
    found = {item.id: item for item in device_view.readings(state, now)}
    if device not in found:
        there = ", ".join(found)
        return InvalidRequestError(f"unknown device {device!r}; devices: {there}", param="device")
    if found[device].state not in USABLE:
        return InvalidRequestError(f"{device} is {found[device].state}; choose another device", param="device")
    if device in replicas.taken_devices(state, model):
        return InvalidRequestError(
            f"{device} has another replica of {model.spec.configured_id!r}; choose another device", param="device"
        )
    if device != CPU and (model.spec.gpu_layers == 0 or state.settings.force_cpu_mode):
        cause = "INFERENCE_FORCE_CPU_MODE is set" if state.settings.force_cpu_mode else "its gpu_layers is 0"
        return InvalidRequestError(f"{model.id!r} runs on the CPU only: {cause}", param="device")
    return None


def advance(draft: Draft, id: int, command: MoveCommand) -> None:
    """Measures the model on the device, checks that it fits, and begins the move; the readings are current."""
    if command.begun:
        return
    model = draft.state.models.get(command.model)
    if model is None or model.removed:
        _end(draft, id, command, ModelNotFound(command.model, sorted(draft.state.config.model_ids)))
        return
    if error := _unusable(draft.state, model, command.device, draft.now):
        _end(draft, id, command, error)
        return
    key = decision.unmeasured_on(draft.state, model, (command.device,))
    if key is not None:
        estimates.request(draft, key)
        return
    reading = device_view.reading(draft.state, command.device, draft.now)
    assert reading is not None
    if refusal := _refused(draft.state, model, reading, draft.now):
        _end(draft, id, command, refusal)
        return
    worker = draft.worker_of(model.id)
    old_device = worker.placement.devices[0] if worker is not None and model.state in ACCEPTING else None
    draft.info("moving %s to %s (before: %s)", model.id, command.device, old_device or model.state)
    draft.set_model(model.id, target=command.device, old_device=old_device, move_error=None)
    if worker is not None:
        departure.leave(draft, model.id, Reason.MOVED, explanation=(f"to {command.device}",))
        if draft.model(model.id).worker == worker.id:
            departure.stop_in(draft, model.id, draft.state.settings.drain_seconds)
    ticket = draft.number()
    draft.set_command(id, replace(command, begun=True, ticket=ticket))
    request_events.wanted(draft, Wanted(ticket, model.id, Priority.HIGH, command.seconds, purpose=Purpose.MOVE))


def _refused(state: State, model: ModelRecord, reading: Reading, now: float) -> MemoryLimitExceededError | None:
    """Why the model does not fit on the device after evictions, or None."""
    found = decision.plan_on(state, model, [reading], now, evicts=True)
    if not isinstance(found, Refusal):
        return None
    return MemoryLimitExceededError(model.id, found.lacks, reason=f"on {reading.id}: {found.reason}", fix=found.fix)


def settled(draft: Draft, ticket: TicketRecord, error: InferenceError | None) -> None:
    """The model was loaded, or the load failed."""
    for id, command in list(draft.state.commands.items()):
        if isinstance(command, MoveCommand) and command.ticket == ticket.id:
            _end(draft, id, command, error or _missed(draft.state, command))


def _missed(state: State, command: MoveCommand) -> InferenceError | None:
    """Why the model was not loaded on the device of the move, or None."""
    model = state.models.get(command.model)
    if model is None:
        return None
    worker = state.worker_of(model)
    there = () if worker is None else worker.placement.devices
    if model.move_error is not None or there == (command.device,):
        return model.move_error
    return DeviceLost(f"{command.device} is gone; {model.id!r} was loaded on {', '.join(there) or 'no device'}")


def cannot_measure(draft: Draft, spec: ModelSpec, error: InferenceError) -> None:
    """A model cannot be measured."""
    for id, command in list(draft.state.commands.items()):
        if isinstance(command, MoveCommand) and not command.begun and command.model == spec.id:
            _end(draft, id, command, error)


def abandon(draft: Draft, id: int, command: MoveCommand) -> None:
    """The client has disconnected: a load that has begun continues, and nothing else of the move does. A model that
    drains stays (`reconcile`)."""
    if command.ticket is not None and command.ticket in draft.state.tickets:
        tickets.unqueue(draft, command.ticket)
    _clear_target(draft, command)
    draft.drop_command(id)
    draft.plan()


def _clear_target(draft: Draft, command: MoveCommand) -> None:
    if command.begun and command.model in draft.state.models:
        draft.set_model(command.model, target=None, old_device=None, move_error=None)


def _end(draft: Draft, id: int, command: MoveCommand, error: InferenceError | None) -> None:
    _clear_target(draft, command)
    draft.drop_command(id)
    draft.plan()
    if command.returns_from_cpu:
        _returned(draft, command, error)
    elif command.parent is not None:
        parent = draft.state.commands.get(command.parent)
        if isinstance(parent, DefragmentCommand) and parent.moving is not None:
            shift = replace(parent.moving, reason=None if error is None else error.message)
            draft.set_command(command.parent, replace(parent, moving=None, done=(*parent.done, shift)))
    else:
        draft.emit(Answer(id) if error is None else Refuse(id, error))


def _returned(draft: Draft, command: MoveCommand, error: InferenceError | None) -> None:
    if error is None:
        draft.count("recoveries", "accelerator")
    elif command.model in draft.state.models:
        stays_on_cpu(draft, command.model, error)


def stays_on_cpu(draft: Draft, model: str, error: InferenceError) -> None:
    """A model could not be moved back to an accelerator."""
    draft.set_model(model, on_cpu_until=draft.now + REST_SECONDS)
    draft.warning("%s stays on the CPU for %g s more: %s", model, REST_SECONDS, error.message)


# --- return after a fallback to the CPU ------------------------------------------------------------------------------


def check_fallbacks(draft: Draft) -> None:
    """Begins a check for each idle model that fell back, at intervals."""
    for model in draft.state.models.values():
        known = draft.state.cpu_returns.get(model.id)
        if not oom_recovery.is_fallback(draft.state, model):
            if known is not None:
                _forget_fallback(draft, model.id)
            continue
        known = known or CpuReturn()
        is_due = draft.now >= max(known.check_again_at, model.on_cpu_until)
        if known.awaited_read is None and is_due and _is_idle(draft.state, model):
            begun = CpuReturn(device_view.read(draft), draft.now + FALLBACK_CHECK_SECONDS)
            draft.set(cpu_returns={**draft.state.cpu_returns, model.id: begun})


def _is_idle(state: State, model: ModelRecord) -> bool:
    is_free = model.state is ModelState.READY and not state.in_flight(model) and not model.queue.waiters
    moves = any(isinstance(item, MoveCommand) and item.model == model.id for item in state.commands.values())
    return is_free and model.target is None and not moves


def has_pending_cpu_return(state: State) -> bool:
    """Whether a check can continue, because its reading has come."""
    return any(
        item.awaited_read is not None and state.devices.reads_done >= item.awaited_read
        for item in state.cpu_returns.values()
    )


def advance_cpu_returns(draft: Draft) -> None:
    """Continues the checks whose reading has come; the readings are current."""
    for id, known in list(draft.state.cpu_returns.items()):
        if known.awaited_read is None or draft.state.devices.reads_done < known.awaited_read:
            continue
        model = draft.state.models.get(id)
        if model is None or not oom_recovery.is_fallback(draft.state, model) or not _is_idle(draft.state, model):
            _end_check(draft, id)
            continue
        key = decision.unmeasured(draft.state, model, draft.now)
        if key is not None and estimates.request(draft, key):
            continue
        _end_check(draft, id)
        device = _accelerator_with_room(draft.state, model, draft.now)
        if device is not None:
            draft.info("moving %s from the CPU back to %s, which has enough free memory again", id, device)
            begin(draft, draft.number(), Move(id, device), returns_from_cpu=True)


def cpu_return_is_unmeasurable(draft: Draft, spec: ModelSpec, error: InferenceError) -> None:
    """A model cannot be measured."""
    known = draft.state.cpu_returns.get(spec.id)
    if known is not None and known.awaited_read is not None:
        _end_check(draft, spec.id)
        stays_on_cpu(draft, spec.id, error)


def _end_check(draft: Draft, id: str) -> None:
    known = replace(draft.state.cpu_returns[id], awaited_read=None)
    draft.set(cpu_returns={**draft.state.cpu_returns, id: known})


def _forget_fallback(draft: Draft, id: str) -> None:
    draft.set(cpu_returns={name: item for name, item in draft.state.cpu_returns.items() if name != id})


def _accelerator_with_room(state: State, model: ModelRecord, now: float) -> str | None:
    """The accelerator where the model fits without evictions, or None."""
    devices = replicas.free_of_siblings(state, model, device_view.devices_of(state, model.effective, now))
    allowed = allowed_devices(state, model.effective, [item for item in devices if item.id != CPU], now)
    if isinstance(allowed, Refusal):
        return None
    found = decision.plan_on(state, model, allowed, now, evicts=False)
    alone = isinstance(found, Placement) and found.result is Result.FREE and len(found.devices) == 1
    return found.device if isinstance(found, Placement) and alone else None
