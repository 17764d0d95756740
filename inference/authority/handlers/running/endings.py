"""The end of a worker: stop, release of memory, record of the departure.

The memory of a model on the host alone is released at once, that of other models when a reading of their devices shows
it as free. Memory that a device does not show as free in time counts as foreign.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headgate.shared.units import mib
from inference.authority.draft import Draft
from inference.authority.effects import Publish, StopWorker
from inference.authority.handlers.queries import device_view
from inference.authority.lifecycle import Departure, Eviction, ModelEvent
from inference.authority.pending_commands import CollectCommand, EvictCommand
from inference.authority.placement.device_growth import forfeited
from inference.authority.placement.ledger import Ledger, Phase
from inference.authority.pressure.levels import with_forfeited
from inference.authority.state import Return, TimerKind, WorkerRecord
from inference.devices.device import CPU

MAX_RECORDS = 1000
FIRST_PAUSE_SECONDS = 0.02
LAST_PAUSE_SECONDS = 0.25
"""Pauses between readings; short at first, because memory is usually free at once and a load waits for it."""
SLACK_BYTES = 64 * 2**20


def end(draft: Draft, model: str, departure: Departure | None) -> None:
    """Stops a worker that runs no requests. Its memory is released when it has ended."""
    worker = draft.worker_of(model)
    assert worker is not None
    draft.set_worker(worker.id, departure=departure)
    draft.advance(model, ModelEvent.UNLOAD)
    draft.set(ledger=draft.state.ledger.leave(worker.holding))
    draft.emit(StopWorker(worker.id))


def detach(draft: Draft, worker: WorkerRecord) -> None:
    """Separates a model from its worker, whose memory is released when it has ended."""
    ledger = draft.state.ledger
    draft.set_model(worker.model, worker=None)
    if ledger.holdings[worker.holding].phase is not Phase.RELEASING:
        draft.set(ledger=ledger.leave(worker.holding))
    if draft.model(worker.model).removed:
        draft.drop_model(worker.model)


def release_extra(draft: Draft, worker: WorkerRecord) -> WorkerRecord:
    """Releases the second holding of an ended worker."""
    if worker.extra is None:
        return worker
    draft.set(ledger=draft.state.ledger.release(worker.extra))
    return draft.set_worker(worker.id, extra=None)


def release(draft: Draft, holding: str, model: str, departure: Departure | None) -> None:
    """Releases a holding whose memory is free."""
    freed_bytes = sum(draft.state.ledger.holdings[holding].bytes.values())
    draft.set(ledger=draft.state.ledger.release(holding))
    record(draft, model, departure, freed_bytes)
    draft.plan()


def record(draft: Draft, model: str, departure: Departure | None, freed_bytes: int) -> None:
    """Records the departure of a model that released `freed_bytes`."""
    if departure is None:
        return
    found = Eviction(
        model,
        departure.reason,
        departure.action,
        mib(freed_bytes),
        draft.unix,
        departure.explanation,
        departure.wanted_by,
    )
    state = draft.state
    departures = state.departures.copy()
    departures[str(departure.action)] += 1
    draft.set(evictions=(*state.evictions, found)[-MAX_RECORDS:], departures=departures)
    draft.count("evictions", str(departure.action), str(departure.reason))
    draft.emit(Publish("eviction", {"eviction": found.to_json()}))
    for id, command in state.commands.items():
        if isinstance(command, EvictCommand) and command.model == model and command.record is None:
            draft.set_command(id, EvictCommand(model, found))
        elif isinstance(command, CollectCommand) and model in command.awaited:
            records = (*command.records, found)
            draft.set_command(id, CollectCommand(command.awaited - {model}, records, command.trimming))


# --- memory that devices do not show as free yet ---------------------------------------------------------------------


def release_when_free(draft: Draft, worker: WorkerRecord) -> None:
    """Releases the memory of an ended worker: at once if all of it is host memory, else after a reading shows it."""
    if all(device == CPU for device in worker.placement.need):
        release(draft, worker.holding, worker.model, worker.departure)
        return
    devices = worker.placement.devices
    awaited = Return(
        worker.id,
        worker.model,
        worker.holding,
        devices,
        {name: draft.state.ledger.balance(name).foreign_bytes for name in devices},
        draft.now + draft.state.timing.return_seconds,
        FIRST_PAUSE_SECONDS,
        device_view.read(draft),
        worker.departure,
    )
    draft.set(returns={**draft.state.returns, worker.holding: awaited})
    draft.timer(TimerKind.RETURN, worker.holding, awaited.deadline)


def reading_taken(draft: Draft, *, problem: str | None = None) -> None:
    """A reading has come or failed: decides for all memory that waited for it."""
    for holding, awaited in list(draft.state.returns.items()):
        if draft.state.devices.reads_done < awaited.awaited_read:
            continue
        if problem is not None:
            first = awaited.pause == FIRST_PAUSE_SECONDS
            if first:
                draft.warning(
                    "%s could not be read after the worker of %s ended: %s", awaited.devices[0], awaited.model, problem
                )
        elif all(_is_back(draft, awaited, name) for name in awaited.devices):
            _forget_return(draft, holding)
            release(draft, holding, awaited.model, awaited.departure)
            draft.changed()
            continue
        pause = min(2 * awaited.pause, LAST_PAUSE_SECONDS)
        again = replace(awaited, pause=pause, awaited_read=2**62)
        draft.set(returns={**draft.state.returns, holding: again})
        draft.timer(TimerKind.RETURN, holding, min(draft.now + awaited.pause, awaited.deadline))


def return_is_due(draft: Draft, holding: str) -> None:
    """The next reading is due, or the memory is overdue."""
    awaited = draft.state.returns.get(holding)
    if awaited is None:
        return
    if draft.now < awaited.deadline:
        again = replace(awaited, awaited_read=device_view.read(draft))
        draft.set(returns={**draft.state.returns, holding: again})
        draft.timer(TimerKind.RETURN, holding, awaited.deadline)
        return
    _forget_return(draft, holding)
    draft.warning(
        "the worker of %s ended, but not all of its memory on %s became free within %g s; the rest counts as foreign",
        awaited.model,
        ", ".join(awaited.devices),
        draft.state.timing.return_seconds,
    )
    lost = draft.state.ledger.holdings[holding].bytes
    draft.set_devices(growth=forfeited(draft.state.devices.growth, lost))
    before = draft.state.ledger
    draft.set(ledger=before.forfeit(holding))
    _accept_forfeited(draft, {name: _foreign_rise(before, draft.state.ledger, name) for name in awaited.devices})
    record(draft, awaited.model, awaited.departure, 0)
    draft.changed()
    draft.plan()


def _foreign_rise(before: Ledger, after: Ledger, device: str) -> int:
    return after.balance(device).foreign_bytes - before.balance(device).foreign_bytes


def _accept_forfeited(draft: Draft, rises: Mapping[str, int]) -> None:
    """Memory that became foreign here does not count as a rise of foreign use, for which idle models would leave."""
    pressure = draft.state.pressure
    devices = {
        device: replace(known, gauge=with_forfeited(known.gauge, rises.get(device, 0)))
        for device, known in pressure.devices.items()
    }
    draft.set(pressure=replace(pressure, devices=devices))


def _forget_return(draft: Draft, holding: str) -> None:
    draft.set(returns={id: awaited for id, awaited in draft.state.returns.items() if id != holding})
    draft.cancel(TimerKind.RETURN, holding)


def _is_back(draft: Draft, awaited: Return, device: str) -> bool:
    reading = device_view.reading(draft.state, device, draft.now)
    ledger = draft.state.ledger
    ours = ledger.balance(device).ours_bytes - ledger.holdings[awaited.holding].bytes.get(device, 0)
    return reading is None or reading.used_bytes <= awaited.foreign[device] + ours + SLACK_BYTES
