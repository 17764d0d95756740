"""The start: creates the accounts of devices and the records of models, and tests suspension if configured."""

from __future__ import annotations

from headgate.shared.units import format_bytes
from inference.authority.draft import Draft
from inference.authority.effects import ProveSuspension
from inference.authority.events import DevicesFound, SuspensionTested
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.running import device_care
from inference.authority.handlers.running.keeping import TESTED
from inference.authority.handlers.watching import governor
from inference.authority.state import TimerKind

TICK_SECONDS = 0.5


def devices_found(draft: Draft, event: DevicesFound) -> None:
    """The devices of the machine were found."""
    draft.set(unix_offset=event.unix - draft.now)
    draft.set_devices(measured=event.readings, refreshed_at=draft.now, carriers=dict(event.carriers))
    device_care.take(draft)
    draft.state = device_view.limited(device_view.entered(draft.state, draft.now))
    there = device_view.accelerators(draft.state, draft.now)
    for item in device_view.readings(draft.state, draft.now):
        draft.info("device %s: %s, %s", item.id, item.name, format_bytes(item.total_bytes))
    if not there:
        draft.info("no accelerators: models run on the CPU")
    governor.begin(draft)
    _prove(draft)
    if not draft.state.devices.proving:
        _started(draft)


def _prove(draft: Draft) -> None:
    """Begins suspension tests: on simulated devices before any load, on others in the background."""
    mode = draft.state.settings.warm_checkpoint
    devices = {item.kind: item for item in reversed(device_view.accelerators(draft.state, draft.now))}
    suspension: dict[str, str | None] = {}
    proving: set[str] = set()
    for kind in draft.state.devices.carriers:
        if mode == "off" or (mode == "simulated" and kind not in TESTED):
            suspension[kind] = f"INFERENCE_WARM_CHECKPOINT is {mode}"
        elif kind not in devices:
            suspension[kind] = "there is no such device"
        else:
            draft.emit(ProveSuspension(kind, devices[kind]))
            if kind in TESTED:
                proving.add(kind)
    draft.set_devices(suspension=suspension, proving=frozenset(proving))


def suspension_tested(draft: Draft, event: SuspensionTested) -> None:
    """A suspension test has ended."""
    devices = draft.state.devices
    carrier = devices.carriers.get(event.kind, event.kind)
    if event.problem is None:
        draft.info("warm models are kept by checkpoints of %s: the test succeeded", carrier)
    else:
        draft.warning("checkpoints of %s are not used: %s", carrier, event.problem)
    draft.set_devices(
        suspension={**devices.suspension, event.kind: event.problem}, proving=devices.proving - {event.kind}
    )
    if devices.proving and not draft.state.devices.proving and not draft.state.started:
        _started(draft)


def _started(draft: Draft) -> None:
    """Completes the start. Requests may be waiting already, because the port opens before."""
    startup = () if draft.state.settings.enable_lazy_model_loading else tuple(draft.state.models)
    draft.set(started=True, foreseen=tuple(draft.state.models), startup=startup, ticks_at=draft.now + TICK_SECONDS)
    draft.timer(TimerKind.PERIODIC, 0, draft.now + TICK_SECONDS)
    device_care.publish(draft)
    draft.plan()
