"""Moves a model to a device, and back if that fails.

The move is planned first; a refusal changes nothing.
"""

from __future__ import annotations

from dataclasses import replace

from inference.authority.device_health import USABLE
from inference.authority.draft import Draft
from inference.authority.effects import Answer, Refuse
from inference.authority.events import Move, Wanted
from inference.authority.handlers.placing import decision, measuring
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.queries.plan_inputs import Subject, held_models, request_for, shortages_of
from inference.authority.handlers.queueing import request_events
from inference.authority.handlers.running import departure, tickets
from inference.authority.lifecycle.departures import Reason
from inference.authority.placement.plan import Refusal, plan
from inference.authority.placement.reduction import REST_SECONDS
from inference.authority.state import DefragmentCommand, ModelRecord, MoveCommand, Purpose, State, TicketRecord
from inference.devices.device import CPU, Reading
from inference.errors import InferenceError, InvalidRequestError, MemoryLimitExceededError, ModelNotFound
from inference.protocol import ModelState, Priority
from inference.settings import ModelSpec

_SETTLED = (ModelState.READY, ModelState.BUSY)


def begin(draft: Draft, id: int, request: Move, *, returns_home: bool = False, parent: int | None = None) -> None:
    """Begins a move that an operator or the authority requested."""
    command = MoveCommand(request.model, request.device, request.seconds, returns_home=returns_home, parent=parent)
    draft.set(commands={**draft.state.commands, id: command})
    model = draft.state.models.get(request.model)
    if model is None or model.removed:
        _end(draft, id, command, ModelNotFound(request.model, sorted(draft.state.config.models)))
        return
    if error := _unusable(draft.state, model, request.device, draft.now):
        _end(draft, id, command, error)
        return
    worker = draft.worker_of(model.id)
    if worker is not None and model.state in _SETTLED and worker.placement.devices == (request.device,):
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
        return InvalidRequestError(f"{device} is {found[device].state}", param="device")
    if device != CPU and (model.spec.gpu_layers == 0 or state.settings.force_cpu_mode):
        return InvalidRequestError(f"{model.id!r} is configured to use no accelerator", param="device")
    return None


def advance(draft: Draft, id: int, command: MoveCommand) -> None:
    """Measures the model on the device, checks that it fits, and begins the move; the readings are current."""
    if command.begun:
        return
    model = draft.state.models.get(command.model)
    if model is None or model.removed:
        _end(draft, id, command, ModelNotFound(command.model, sorted(draft.state.config.models)))
        return
    if error := _unusable(draft.state, model, command.device, draft.now):
        _end(draft, id, command, error)
        return
    key = decision.needs_of(draft.state, model, (command.device,))
    if key is not None:
        measuring.request(draft, key)
        return
    reading = device_view.reading(draft.state, command.device, draft.now)
    assert reading is not None
    if refusal := _refused(draft.state, model, reading, draft.now):
        _end(draft, id, command, refusal)
        return
    worker = draft.worker_of(model.id)
    home = worker.placement.devices[0] if worker is not None and model.state in _SETTLED else None
    draft.info("moving %s to %s (before: %s)", model.id, command.device, home or model.state)
    draft.set_model(model.id, target=command.device, home=home, moved_in_vain=None)
    if worker is not None:
        departure.leave(draft, model.id, Reason.MOVED, explanation=(f"to {command.device}",))
        if draft.model(model.id).worker == worker.id:
            departure.stop_in(draft, model.id, draft.state.settings.drain_seconds)
    ticket = draft.number()
    draft.set(commands={**draft.state.commands, id: replace(command, begun=True, ticket=ticket)})
    request_events.wanted(draft, Wanted(ticket, model.id, Priority.HIGH, command.seconds, purpose=Purpose.MOVE))


def _refused(state: State, model: ModelRecord, reading: Reading, now: float) -> MemoryLimitExceededError | None:
    """Why the model does not fit on the device after evictions, or None."""
    request = request_for(Subject.of(state, model.effective), [reading], divide=False)
    assert request is not None
    held = held_models(state, now)
    own = {item.holding for item in held if item.model == model.id}
    others = [item for item in held if item.holding not in own]
    found = plan(request, state.ledger.without(own), others, device_view.policy(state.settings, now))
    if not isinstance(found, Refusal):
        return None
    return MemoryLimitExceededError(
        model.id, shortages_of(found), reason=f"on {reading.id}: {found.reason}", fix=found.fix
    )


def settled(draft: Draft, ticket: TicketRecord, error: InferenceError | None) -> None:
    """The model was loaded, or the load failed."""
    for id, command in list(draft.state.commands.items()):
        if isinstance(command, MoveCommand) and command.ticket == ticket.id:
            model = draft.state.models.get(command.model)
            _end(draft, id, command, error or (model.moved_in_vain if model is not None else None))


def cannot_measure(draft: Draft, spec: ModelSpec, error: InferenceError) -> None:
    """A model cannot be measured."""
    for id, command in list(draft.state.commands.items()):
        if isinstance(command, MoveCommand) and not command.begun and command.model == spec.id:
            _end(draft, id, command, error)


def abandon(draft: Draft, id: int, command: MoveCommand) -> None:
    """The client has disconnected: the move continues without an answer."""
    if command.ticket is not None and command.ticket in draft.state.tickets:
        tickets.unqueue(draft, command.ticket)
    _forget_target(draft, command)
    draft.set(commands={other: item for other, item in draft.state.commands.items() if other != id})
    draft.plan()


def _forget_target(draft: Draft, command: MoveCommand) -> None:
    if command.begun and command.model in draft.state.models:
        draft.set_model(command.model, target=None, home=None, moved_in_vain=None)


def _end(draft: Draft, id: int, command: MoveCommand, error: InferenceError | None) -> None:
    _forget_target(draft, command)
    draft.set(commands={other: item for other, item in draft.state.commands.items() if other != id})
    draft.plan()
    if command.returns_home:
        _returned(draft, command, error)
    elif command.parent is not None:
        parent = draft.state.commands.get(command.parent)
        if isinstance(parent, DefragmentCommand) and parent.moving is not None:
            shift = replace(parent.moving, reason=None if error is None else error.message)
            changed = replace(parent, moving=None, done=(*parent.done, shift))
            draft.set(commands={**draft.state.commands, command.parent: changed})
    else:
        draft.emit(Answer(id) if error is None else Refuse(id, error))


def _returned(draft: Draft, command: MoveCommand, error: InferenceError | None) -> None:
    if error is None:
        draft.count("recoveries", "accelerator")
    elif command.model in draft.state.models:
        stays_on_cpu(draft, command.model, error)


def stays_on_cpu(draft: Draft, model: str, error: InferenceError) -> None:
    """A model could not be moved back to an accelerator."""
    draft.set_model(model, sheltered_until=draft.now + REST_SECONDS)
    draft.warning("%s stays on the CPU for now: %s", model, error.message)
