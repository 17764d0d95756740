"""Effects of device health: trials, readings, departures and reloads of models."""

from __future__ import annotations

from collections.abc import Sequence

from inference.authority.device_health import DeviceHealth, Effect, Read, Seen, Suspected, Tick, TrialResult, step
from inference.authority.draft import Draft
from inference.authority.effects import LoseWorker, Publish, TryDevice
from inference.authority.handlers.measuring import helper_contexts
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.queries.plan_inputs import workers_on
from inference.authority.handlers.running import departure, endings, warm_pool
from inference.authority.lifecycle import Action, Departure, ModelEvent, Reason
from inference.authority.pending_commands import RecoverCommand
from inference.authority.retention import Mechanism
from inference.authority.state import ModelRecord, State, WorkerRecord
from inference.devices.device import CPU
from inference.devices.signs import Sign
from inference.errors import DeviceLost, InvalidRequestError
from inference.protocol import DeviceState, ExitCause, ModelState
from inference.workers.exit_cause import WorkerExit

MAX_TRIAL_WAIT_SECONDS = 2.0
"""Requests wait for the result of a trial only within this time after the start of the incident."""
_DOUBTFUL = (ExitCause.DEVICE_LOST, ExitCause.HANG)
_IN_USE = (ModelState.LOADING, ModelState.READY, ModelState.BUSY, ModelState.RESTORING)


# --- what is seen ----------------------------------------------------------------------------------------------------
def take_readings(draft: Draft) -> None:
    """Passes new readings to the health of their devices; a device that is not listed is missing."""
    devices = draft.state.devices
    found = {item.id: item for item in devices.measured if item.id != CPU}
    for device in {**devices.health, **found}:
        reading = found.get(device)
        sign, note = (Sign.MISSING, "it is missing") if reading is None else (reading.sign, reading.note)
        news = (devices.reads_done, sign, note)
        if draft.state.devices.reported_signs.get(device) != news:
            draft.set_devices(reported_signs={**draft.state.devices.reported_signs, device: news})
            handle(draft, device, Read(sign, note))


def tick(draft: Draft) -> None:
    """Time has passed."""
    take_readings(draft)
    for device in list(draft.state.devices.health):
        is_booked = any(holding.bytes.get(device) for holding in draft.state.ledger.holdings.values())
        handle(draft, device, Tick(not workers_on(draft.state, device) and not is_booked))


def worker_ended(draft: Draft, worker: WorkerRecord, exit: WorkerExit) -> None:
    """A worker ended. If it hung, or ended because of a lost device, its accelerators are tried."""
    if exit.cause not in _DOUBTFUL or worker.failure is not None:
        return
    for device in worker.placement.devices:
        if device != CPU and health_of(draft.state, device).usable:
            _remember(draft, device, worker)
            handle(draft, device, Suspected(f"{worker.model}: {exit.message}"))


def trial_ended(draft: Draft, device: str, trial: int, failure: str | None) -> None:
    """A trial on a device has ended."""
    helper_contexts.end(draft, (device, trial))
    handle(draft, device, TrialResult(trial, failure))


def read_done(draft: Draft) -> None:
    """A new reading was taken: begins the trials that waited for it."""
    for device, (needed, trial) in list(draft.state.devices.trials.items()):
        if draft.state.devices.reads_done >= needed:
            waiting = {name: item for name, item in draft.state.devices.trials.items() if name != device}
            draft.set_devices(trials=waiting)
            health = health_of(draft.state, device)
            if health.state is DeviceState.PROBING and health.trial == trial:
                helper_contexts.begin(draft, (device, trial), (device,))
                draft.emit(TryDevice(device, trial))


def health_of(state: State, device: str) -> DeviceHealth:
    """The health of a device."""
    return state.devices.health.get(device, DeviceHealth())


def is_verdict_awaited(state: State, device: str, now: float) -> bool:
    """Whether the device was healthy until recently and is being tried, so that requests wait for the verdict."""
    health = health_of(state, device)
    return (
        now - health.unhealthy_since < MAX_TRIAL_WAIT_SECONDS
        and health.state is DeviceState.PROBING
        and not health.emptied
    )


def device_lost_error(state: State, model: ModelRecord, devices: Sequence[str], what: str, now: float) -> DeviceLost:
    """The error for a model on these lost devices, with the time when a retry may succeed."""
    places = device_view.devices_of(state, model.effective, now)
    waits = [1.0, model.backoff.delay_seconds]
    if not places:
        waits += [health_of(state, device).seconds_to_verdict(now) or 0.0 for device in devices]
    return DeviceLost(
        f"the model {model.id!r} lost {', '.join(devices)}: {what}",
        retry_after=max(waits),
        details={"cause": str(ExitCause.DEVICE_LOST), "devices": list(devices)},
    )


# --- what follows ----------------------------------------------------------------------------------------------------
def handle(draft: Draft, device: str, seen: Seen) -> None:
    """Passes evidence to the state machine of a device, and performs its effects."""
    before = health_of(draft.state, device)
    health, effects = step(before, seen, draft.now, draft.state.settings.drain_seconds)
    if health != before or device not in draft.state.devices.health:
        draft.set_devices(health={**draft.state.devices.health, device: health})
    if health.state is not before.state:
        _report(draft, device, before, health)
    for effect in effects:
        _carry_out(draft, device, health, effect)
    if health.usable and device in draft.state.devices.lost_models:
        lost_models = draft.state.devices.lost_models
        draft.set_devices(lost_models={name: found for name, found in lost_models.items() if name != device})
    if health.state is not before.state:
        draft.plan()


def _report(draft: Draft, device: str, before: DeviceHealth, health: DeviceHealth) -> None:
    write = draft.warning if before.usable and not health.usable else draft.info
    note = f": {health.note}" if health.note else ""
    write("%s is %s (%s before)%s", device, health.state, before.state, note)
    publish(draft)
    draft.changed()


def _carry_out(draft: Draft, device: str, health: DeviceHealth, effect: Effect) -> None:
    match effect:
        case Effect.LOSE:
            _lose(draft, device, health.note)
        case Effect.DRAIN:
            _drain(draft, device, health.note)
        case Effect.PROBE if not draft.state.closing:
            trials = {**draft.state.devices.trials, device: (device_view.read(draft), health.trial)}
            draft.set_devices(trials=trials)
        case Effect.READ:
            device_view.read(draft)
        case Effect.RESTART:
            draft.set(restart_reason=f"new processes cannot reach {device} ({health.note})")
        case Effect.RELOAD:
            draft.count("recoveries", "device")
            for name in sorted(draft.state.devices.lost_models.get(device, ())):
                draft.set(reloads=(*draft.state.reloads, name))


def _lose(draft: Draft, device: str, why: str) -> None:
    """Makes every model on the device cold at once, before its process has ended."""
    for worker in workers_on(draft.state, device):
        _remember(draft, device, worker)
        what = f"{device} is lost ({why})"
        draft.error("%s is unloaded: %s", worker.model, what)
        failure = device_lost_error(draft.state, draft.model(worker.model), worker.placement.devices, why, draft.now)
        worker = draft.set_worker(worker.id, failure=failure)
        draft.emit(LoseWorker(worker.id, what))
        draft.advance(worker.model, ModelEvent.FAIL)
        draft.advance(worker.model, ModelEvent.RETRY)
        draft.set_model(worker.model, failure=failure.message)
        endings.detach(draft, worker)
    for model in list(draft.state.models.values()):
        kept = model.kept
        bound = kept is not None and kept.mechanism is Mechanism.CHECKPOINT and kept.original_device == device
        if bound and model.state is ModelState.WARM:
            warm_pool.drop(draft, model.id, Departure(Reason.DEVICE, Action.UNLOAD, (f"{device}: {why}",)))
    if device in draft.state.ledger.accounts or device in draft.state.ledger.shared:
        draft.set(ledger=draft.state.ledger.write_off(device))
        marks = {name: mark for name, mark in draft.state.devices.growth.items() if name != device}
        draft.set_devices(growth=marks)


def _drain(draft: Draft, device: str, why: str) -> None:
    for worker in workers_on(draft.state, device):
        _remember(draft, device, worker)
        departure.leave(draft, worker.model, Reason.DEVICE, explanation=(f"{device}: {why}",))
        if draft.model(worker.model).worker == worker.id:
            departure.stop_in(draft, worker.model, draft.state.settings.drain_seconds)


def _remember(draft: Draft, device: str, worker: WorkerRecord) -> None:
    """Remembers a model in use, to load it again elsewhere or when the device is back."""
    model = draft.state.models.get(worker.model)
    if model is None or model.removed or model.state not in _IN_USE:
        return
    idle = draft.now - max(model.last_used_at, worker.ready_at)
    recent = idle < draft.state.settings.eviction_idle_threshold_seconds
    if model.spec.pinned or worker.leases or recent:
        lost_models = draft.state.devices.lost_models
        draft.set_devices(lost_models={**lost_models, device: lost_models.get(device, frozenset()) | {model.id}})
        draft.set(reloads=(*draft.state.reloads, model.id))


def loaded_again(draft: Draft, id: str) -> None:
    """A model that lost its device is loaded again."""
    lost_models = draft.state.devices.lost_models
    draft.set_devices(lost_models={device: names - {id} for device, names in lost_models.items()})


# --- operators and listeners -----------------------------------------------------------------------------------------
def refuse_recovery(state: State, device: str) -> InvalidRequestError | None:
    """Why a device cannot be recovered, or None."""
    known = [item.id for item in state.devices.measured if item.id != CPU]
    if device in known:
        return None
    names = ", ".join(known) or "none"
    return InvalidRequestError(f"unknown accelerator {device!r}; accelerators: {names}", param="device")


def renewed(draft: Draft, id: int) -> None:
    """The second step of a recovery: the helpers restart, and the device of command `id` is tried."""
    command = draft.state.commands.get(id)
    if isinstance(command, RecoverCommand):
        handle(draft, command.device, Suspected("an operator requested a trial"))
        draft.set_command(id, RecoverCommand(command.device, renewed=True))


def recovered(draft: Draft, id: int, command: RecoverCommand) -> None:
    """Answers a recovery once the state of its device is decided."""
    if not command.renewed or health_of(draft.state, command.device).state is DeviceState.PROBING:
        return
    found = device_view.reading(draft.state, command.device, draft.now)
    if found is None:
        draft.refuse(id, InvalidRequestError(f"the device {command.device!r} is not found any more", param="device"))
    else:
        draft.answer(id, found)


def publish(draft: Draft) -> None:
    """Publishes new, changed, removed and returned devices to listeners, except those found at the start. Changes of
    memory use alone are not published.
    """
    found = {item.id: item for item in device_view.readings(draft.state, draft.now)}
    before = draft.state.devices.published
    after: dict[str, tuple[str, ...] | None] = dict(before)
    for name, item in found.items():
        now = (item.name, str(item.state), item.note)
        if before and before.get(name) != now:
            draft.emit(Publish("device", {"device": item.to_json()}))
        after[name] = now
    for name, known in before.items():
        if known is not None and name not in found:
            after[name] = None
            draft.emit(Publish("removed", {"device": name}))
    if after != before:
        draft.set_devices(published=after)
