"""The start: creates the accounts of devices, tests suspension if configured, and loads configured models.

Models are loaded in order and without evictions.
"""

from __future__ import annotations

from headgate.shared.units import format_bytes
from inference.authority.draft import Draft
from inference.authority.effects import CheckSuspension
from inference.authority.events import DevicesFound, SuspensionTested, Wanted
from inference.authority.handlers.measuring import estimates
from inference.authority.handlers.placing import decision
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.running import device_incidents, request_events
from inference.authority.handlers.watching import governor, growth_on_devices
from inference.authority.state import SIMULATED, Purpose, TicketRecord, TimerKind
from inference.errors import InferenceError
from inference.settings import ModelSpec, replica_ids

TICK_SECONDS = 0.5


def devices_found(draft: Draft, event: DevicesFound) -> None:
    """The devices of the machine were found."""
    draft.set(unix_offset=event.unix - draft.now)
    draft.set_devices(measured=event.readings, refreshed_at=draft.now, suspenders=dict(event.suspenders))
    device_incidents.take_readings(draft)
    draft.state = device_view.limited(device_view.entered(draft.state, draft.now))
    there = device_view.accelerators(draft.state, draft.now)
    for item in device_view.readings(draft.state, draft.now):
        draft.info("device %s: %s, %s", item.id, item.name, format_bytes(item.total_bytes))
    if not there:
        draft.info("no accelerators: models run on the CPU")
    growth_on_devices.observed(draft, (), is_read=True)
    governor.begin(draft)
    _check_suspension(draft)
    startup = () if draft.state.settings.enable_lazy_model_loading else _loaded_at_start(draft)
    draft.set(started=True, to_measure=tuple(draft.state.models), startup=startup, ticks_at=draft.now + TICK_SECONDS)
    draft.timer(TimerKind.PERIODIC, 0, draft.now + TICK_SECONDS)
    device_incidents.publish(draft)
    draft.plan()  # requests may be waiting already: the port opens before the devices are found


def _loaded_at_start(draft: Draft) -> tuple[str, ...]:
    """Every model in order, then the further replicas of each up to its configured minimum."""
    specs = [model.spec for model in draft.state.models.values()]
    wanted = [spec for spec in specs if spec.id in replica_ids(spec.configured_id, spec.replicas[0])]
    return tuple(spec.id for spec in sorted(wanted, key=lambda spec: spec.replica_of is not None))


def _check_suspension(draft: Draft) -> None:
    """Begins tests of suspension; the simulator needs none."""
    mode = draft.state.settings.warm_checkpoint
    devices = {item.kind: item for item in reversed(device_view.accelerators(draft.state, draft.now))}
    suspension: dict[str, str | None] = {}
    for kind in draft.state.devices.suspenders:
        if mode == "off" or (mode == "simulated" and kind not in SIMULATED):
            suspension[kind] = f"INFERENCE_WARM_CHECKPOINT is {mode}"
        elif kind not in devices:
            suspension[kind] = f"there is no device of the kind {kind}"
        elif kind in SIMULATED:
            suspension[kind] = None if draft.state.linux else "simulated devices suspend processes on Linux only"
        else:
            draft.emit(CheckSuspension(kind, devices[kind]))
    draft.set_devices(suspension=suspension)


def suspension_tested(draft: Draft, event: SuspensionTested) -> None:
    """A suspension test has ended."""
    devices = draft.state.devices
    suspender = devices.suspenders.get(event.kind, event.kind)
    if event.problem is None:
        draft.info("warm models are kept as process checkpoints by %s: the test succeeded", suspender)
    else:
        draft.warning("process checkpoints by %s are not used: %s", suspender, event.problem)
    draft.set_devices(suspension={**devices.suspension, event.kind: event.problem})


# --- loads at the start ----------------------------------------------------------------------------------------------
def load_next(draft: Draft) -> None:
    """Requests the next model when the worker of the previous one was started."""
    while draft.state.startup and not draft.state.closing:
        waiting = [item.model for item in draft.state.tickets.values() if item.purpose is Purpose.STARTUP]
        if any(name in draft.state.models and draft.model(name).worker is None for name in waiting):
            return
        name, *rest = draft.state.startup
        draft.set(startup=tuple(rest))
        if name in draft.state.models:
            request_events.wanted(draft, Wanted(draft.number(), name, purpose=Purpose.STARTUP))


def load_settled(draft: Draft, ticket: TicketRecord, error: InferenceError | None) -> None:
    """A model is loaded, or could not be."""
    if error is not None:
        draft.warning("%s is not loaded at start: %s", ticket.model, error.message)


# --- measurements before the first request ---------------------------------------------------------------------------
def measure_next(draft: Draft) -> None:
    """Measures models one after the other before their first request: those that do not fit are found early."""
    while draft.state.to_measure:
        model = draft.state.models.get(draft.state.to_measure[0])
        if model is not None and model.id not in draft.checked_files:
            draft.plan()
            return
        key = None if model is None else decision.unmeasured(draft.state, model, draft.now)
        if key is not None and estimates.request(draft, key):
            return
        draft.set(to_measure=draft.state.to_measure[1:])


def cannot_measure_ahead(draft: Draft, spec: ModelSpec, error: InferenceError) -> None:
    """A model that was to be measured before a request comes cannot be measured."""
    if spec.id not in draft.state.to_measure:
        return
    draft.set(to_measure=tuple(name for name in draft.state.to_measure if name != spec.id))
    draft.warning("%s cannot be measured: %s", spec.id, error.message)
    draft.set_model(spec.id, failure=error.message)
    draft.changed()
