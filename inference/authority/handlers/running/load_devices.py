"""The devices on which a model may be loaded now: the same for decisions, dry runs and predictions."""

from __future__ import annotations

from inference.authority.device_health import USABLE
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.queries.pressure_view import allowed_devices
from inference.authority.handlers.running import replicas
from inference.authority.placement.plan import Refusal
from inference.authority.state import ModelRecord, State
from inference.devices.device import CPU, Reading


def possible(state: State, model: ModelRecord, now: float) -> tuple[Reading, ...]:
    """The devices for a load of the model, regardless of pressure; none that computes another replica of it."""
    target = None if model.target is None else device_view.reading(state, model.target, now)
    if target is not None:
        is_open = target.state in USABLE and target.id not in replicas.taken_devices(state, model)
        return (target,) if is_open else ()
    return replicas.free_of_siblings(state, model, _for_one(state, model, now))


def allowed(state: State, model: ModelRecord, now: float) -> tuple[Reading, ...] | Refusal:
    """The possible devices that the pressure allows, or why there are none; empty if all are lost or excluded."""
    found = possible(state, model, now)
    if not found and (reason := _taken(state, model, now)):
        return Refusal((), reason, trace=(reason,))
    return allowed_devices(state, model.effective, found, now)


def _for_one(state: State, model: ModelRecord, now: float) -> tuple[Reading, ...]:
    """The devices without regard to other replicas: only the CPU while the model avoids accelerators."""
    found = device_view.devices_of(state, model.effective, now)
    host = tuple(device for device in found if device.id == CPU)
    return host if host and now < model.on_cpu_until else found


def _taken(state: State, model: ModelRecord, now: float) -> str | None:
    """Why other replicas leave no device to the model, or None."""
    name, taken = model.spec.configured_id, replicas.taken_devices(state, model)
    if model.target is not None:
        return f"{model.target} has another replica of {name!r}" if model.target in taken else None
    own = {item.id for item in _for_one(state, model, now)}
    if own == {CPU} and CPU not in taken:
        return f"its accelerators had no memory, and a further replica of {name!r} is not loaded on the CPU"
    return f"every possible device has a replica of {name!r} already" if own else None
