"""The end of a worker: stop, release of memory, record of the departure."""

from __future__ import annotations

from headgate.shared.units import mib
from inference.authority.draft import Draft
from inference.authority.effects import Publish, StopWorker
from inference.authority.lifecycle.departures import Departure, Eviction
from inference.authority.lifecycle.transitions import ModelEvent
from inference.authority.placement.ledger import Phase
from inference.authority.state import CollectCommand, EvictCommand, WorkerRecord

MOST_RECORDS = 1000


def end(draft: Draft, model: str, departure: Departure | None) -> None:
    """Stops a worker without running requests. Its memory is released when it has ended."""
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
    )
    state = draft.state
    departures = state.departures.copy()
    departures[str(departure.action)] += 1
    draft.set(evictions=(*state.evictions, found)[-MOST_RECORDS:], departures=departures)
    draft.count("evictions", str(departure.action), str(departure.reason))
    draft.emit(Publish("eviction", {"eviction": found.to_json()}))
    commands = dict(state.commands)
    for id, command in state.commands.items():
        if isinstance(command, EvictCommand) and command.model == model and command.record is None:
            commands[id] = EvictCommand(model, found)
        elif isinstance(command, CollectCommand) and model in command.awaited:
            commands[id] = CollectCommand(command.awaited - {model}, (*command.records, found), command.trimming)
    if commands != state.commands:
        draft.set(commands=commands)
