"""The steps of a model from its device into the warm pool and back.

A model on the CPU stays in its process, which frees the context. For a model on an accelerator a new process without a
device holds the file, because a device context costs memory. In both cases sequences are stored in the arena of the
model first. A process that the driver can suspend stays as it is. Memory is booked before anything is copied into it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from headgate.shared.units import format_bytes
from inference.authority.draft import Draft
from inference.authority.effects import (
    Checkpoint,
    FreeContext,
    KillWorker,
    SendOrder,
    Spawn,
    StopWorker,
)
from inference.authority.events import CheckpointEnded, ContextFreed, FileHeld
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.queries.plan_inputs import grant_for
from inference.authority.handlers.running import endings, keeping, kv_arenas
from inference.authority.handlers.running.endings import release_when_free
from inference.authority.lifecycle import Action, Departure, ModelEvent, Reason
from inference.authority.placement.ledger import LedgerError
from inference.authority.placement.plan import Allocation, Placement, Result
from inference.authority.retention import HOST, Mechanism, displaced
from inference.authority.state import Kept, ModelRecord, Suspended, TimerKind, WorkerRecord, placement_key
from inference.devices.device import HIDDEN, environment_of
from inference.protocol import ModelState
from inference.worker_link import Hold, Offloaded

ROOM_SECONDS = 5.0
"""How long a departing model waits for models that are dropped for it."""
_S = ModelState


# --- on the way in ---------------------------------------------------------------------------------------------------
def begin(draft: Draft, id: str) -> bool:
    """Begins to keep a draining model without running requests. False if it must be unloaded."""
    model, worker = draft.model(id), draft.worker_of(id)
    assert worker is not None
    if why := keeping.obstacle(draft.state, model):
        draft.info("%s is not kept warm: %s", id, why)
        return False
    how = keeping.mechanism(draft.state, model)
    if how is Mechanism.STANDBY:
        _stand_by(draft, worker)
        return True
    warm = keeping.kept_as(draft.state, model)
    missing, _ = draft.state.ledger.missing({HOST: warm.bytes})
    if missing[HOST]:
        return _make_room(draft, model, worker, missing[HOST])
    try:
        if how is Mechanism.CHECKPOINT:
            _suspend(draft, worker)
        else:
            _hold(draft, model, worker, warm.bytes)
    except LedgerError as error:
        draft.info("%s is not kept warm: %s", id, error)
        return False
    return True


def _make_room(draft: Draft, model: ModelRecord, worker: WorkerRecord, lacking: int) -> bool:
    """Drops warm models of lower worth, once; the departure continues when they have ended."""
    if worker.has_waited:
        return False
    warm = keeping.kept_as(draft.state, model)
    names = displaced(warm, keeping.droppable(draft.state), lacking, draft.now)
    if not names:
        draft.info("%s is not kept warm: %s of host memory are missing", model.id, format_bytes(lacking))
        return False
    awaited = tuple(draft.model(name).worker or "" for name in names)
    draft.set_worker(worker.id, has_waited=True, room_awaited=awaited)
    draft.timer(TimerKind.ROOM_TO_KEEP, worker.id, draft.now + ROOM_SECONDS)
    for name in names:
        drop(draft, name, Departure(Reason.MEMORY_WANTED, Action.UNLOAD, (f"room to keep {model.id} warm",)))
    return True


def drop(draft: Draft, id: str, departure: Departure) -> None:
    """Unloads a warm model."""
    why = "; ".join((str(departure.reason), *departure.explanation))
    draft.info("unloading %s, which is %s (%s)", id, draft.model(id).state, why)
    endings.end(draft, id, replace(departure, action=Action.UNLOAD))


def _stand_by(draft: Draft, worker: WorkerRecord) -> None:
    draft.set_worker(worker.id, saved=None)
    draft.advance(worker.model, ModelEvent.OFFLOAD)
    _free_context(draft, worker, stays=True)


def _free_context(draft: Draft, worker: WorkerRecord, *, stays: bool) -> None:
    """Makes a worker store its sequences in its arena and free its context."""
    draft.emit(FreeContext(worker.id, stays=stays))
    kv_cache_bytes = sum(item.bytes for item in worker.ready.buffers if item.kind == "kv") if worker.ready else 0
    draft.timer(TimerKind.WARM_POOL, worker.id, draft.now + draft.state.timing.store(kv_cache_bytes))


def _hold(draft: Draft, model: ModelRecord, leaving: WorkerRecord, base: int) -> None:
    """Starts a new process that holds the file; the old one stores its sequences for it and ends."""
    id = f"{model.id}#{draft.number()}"
    need = {HOST: base}
    draft.set(ledger=draft.state.ledger.reserve(id, model.id, need, exempt=True))
    host = device_view.reading(draft.state, HOST, draft.now)
    assert host is not None
    holder = WorkerRecord(
        id,
        model.id,
        id,
        Placement(Result.FREE, Allocation.FRACTIONAL, HOST, need),
        host,
        draft.now,
        leaving.spec,
        leaving.estimate,
        files=model.seen_files,
        predecessor=leaving.id,
        left_device=leaving.device.id,
        kv_bytes=None if leaving.kv_bytes is None else 0,
    )
    draft.set(workers={**draft.state.workers, id: holder})
    path = str(model.effective.path)
    draft.emit(Spawn(id, model.id, HIDDEN, Hold(path), stores=leaving.kv_bytes is not None))
    draft.set(ledger=draft.state.ledger.leave(leaving.holding))
    draft.set_worker(leaving.id, saved=None)
    draft.set_model(model.id, worker=id)
    draft.advance(model.id, ModelEvent.OFFLOAD)
    draft.timer(TimerKind.WARM_POOL, id, draft.now + draft.state.timing.store(base))
    _free_context(draft, leaving, stays=False)


def holder_failed(draft: Draft, holder: WorkerRecord, reason: str) -> None:
    """The process to hold a model's file could not be started: the model becomes cold when its old worker has ended."""
    draft.warning("%s is not kept warm: %s", holder.model, reason)
    draft.set(ledger=draft.state.ledger.release(holder.holding))
    draft.set(workers={id: worker for id, worker in draft.state.workers.items() if id != holder.id})
    draft.cancel(TimerKind.WARM_POOL, holder.id)
    leaving = draft.state.workers.get(holder.predecessor or "")
    model = draft.model(holder.model)
    if leaving is None:
        draft.set_model(model.id, worker=None)
        draft.advance(model.id, ModelEvent.UNLOAD)
        draft.advance(model.id, ModelEvent.EXITED)
        return
    departure = leaving.departure or Departure(Reason.IDLE)
    draft.set_worker(leaving.id, departure=replace(departure, action=Action.UNLOAD))
    draft.cancel(TimerKind.WARM_POOL, leaving.id)
    draft.emit(StopWorker(leaving.id))
    draft.set_model(model.id, worker=leaving.id)
    draft.advance(model.id, ModelEvent.UNLOAD)


def context_freed(draft: Draft, event: ContextFreed) -> None:
    """A worker has stored its sequences and freed its context."""
    worker = draft.state.workers.get(event.worker)
    if worker is None:
        return
    worker = draft.set_worker(worker.id, saved=event.saved)
    model = draft.state.models.get(worker.model)
    if model is None or model.worker != worker.id or model.state is not _S.OFFLOADING or worker.predecessor:
        return
    ledger = draft.state.ledger
    before = sum(ledger.holdings[worker.holding].bytes.values())
    ledger = ledger.shrink(worker.holding, keeping.rest_of(draft.state, worker))
    draft.set(ledger=ledger)
    departure = worker.departure
    worker = draft.set_worker(worker.id, ready=None, departure=None, grown_bytes=0)
    freed = before - sum(ledger.holdings[worker.holding].bytes.values())
    endings.record(draft, model.id, departure, freed)
    _mark_warm(draft, worker, Mechanism.STANDBY, HOST, event.saved)


def file_held(draft: Draft, event: FileHeld) -> None:
    """A new worker has the file of its model in memory."""
    if event.worker in draft.state.workers:
        draft.cancel(TimerKind.WARM_POOL, event.worker)
        draft.set_worker(event.worker, held_bytes=event.count_bytes, locked_bytes=event.locked_bytes)
        check_holder(draft, event.worker)


def check_holder(draft: Draft, id: str) -> None:
    """Marks the model as warm when the file is in memory and the old process has ended."""
    holder = draft.worker(id)
    model = draft.state.models.get(holder.model)
    if model is None or model.worker != id or model.state is not _S.OFFLOADING or holder.held_bytes is None:
        return
    if holder.predecessor is None or holder.predecessor in draft.state.workers:
        return
    ledger = draft.state.ledger
    saved = holder.saved or Offloaded(0, 0, 0)
    most = ledger.holdings[holder.holding].bytes[HOST]
    actual = min(most, holder.held_bytes + keeping.CPU_OVERHEAD_BYTES)
    draft.set(ledger=ledger.commit(holder.holding, {HOST: actual}))
    original = holder.left_device or HOST
    _mark_warm(draft, holder, Mechanism.RESIDENT, original, saved)


def _mark_warm(draft: Draft, worker: WorkerRecord, how: Mechanism, device: str, saved: Offloaded) -> None:
    """Marks a model as warm; `saved` are its sequences."""
    ledger = draft.state.ledger.set_exempt(worker.holding)
    draft.set(ledger=ledger)
    draft.cancel(TimerKind.WARM_POOL, worker.id)
    size = sum(ledger.holdings[worker.holding].bytes.values())
    draft.set_worker(worker.id, has_waited=False, room_awaited=(), predecessor=None, left_device=None)
    draft.advance(worker.model, ModelEvent.OFFLOADED)
    locked = worker.locked_bytes if how is Mechanism.RESIDENT else 0
    kept = Kept(how, device, draft.unix, size, saved.sequences, saved.tokens, locked)
    draft.set_model(worker.model, kept=kept)
    draft.info(
        "%s is warm (%s, pid %s): %s in host memory, %d tokens of %d sequences",
        worker.model, how, worker.pid, format_bytes(size), saved.tokens, saved.sequences,
    )  # fmt: skip
    if ledger.excess(HOST):  # a limit was lowered meanwhile
        drop(draft, worker.model, Departure(Reason.LOWERED))


# --- suspension ------------------------------------------------------------------------------------------------------
def _suspend(draft: Draft, worker: WorkerRecord) -> None:
    """Begins to suspend a worker. Its bytes are booked twice until it is suspended, because the copy is complete before
    the device memory is freed. Raises LedgerError.
    """
    held = draft.state.ledger.holdings[worker.holding].bytes
    assert worker.ready is not None
    extra = f"{worker.model}#{draft.number()}"
    draft.set(ledger=draft.state.ledger.reserve(extra, worker.model, {HOST: sum(held.values())}, exempt=True))
    draft.set_worker(worker.id, extra=extra, suspended=Suspended(dict(held), worker.ready))
    draft.advance(worker.model, ModelEvent.OFFLOAD)
    _checkpoint(draft, worker, "suspend", sum(held.values()))


def _checkpoint(draft: Draft, worker: WorkerRecord, operation: Literal["suspend", "resume"], count_bytes: int) -> None:
    assert worker.pid is not None
    timing = draft.state.timing
    device = worker.device
    draft.emit(Checkpoint(operation, worker.id, device.kind, device.id, worker.pid, timing.driver_call(count_bytes)))
    draft.timer(TimerKind.WARM_POOL, worker.id, draft.now + timing.checkpoint(count_bytes))


def suspend_ended(draft: Draft, event: CheckpointEnded) -> None:
    """The driver has suspended a worker, or failed."""
    worker = _under_way(draft, event.worker, _S.OFFLOADING)
    if worker is None or worker.suspended is None or worker.extra is None:
        return
    if event.problem is not None:
        _end_unknown(draft, worker, "could not be suspended", event.problem, by_device_state=event.by_device_state)
        return
    host = device_view.reading(draft.state, HOST, draft.now)
    assert host is not None
    need = {HOST: sum(worker.suspended.need.values())}
    draft.set(ledger=draft.state.ledger.commit(worker.extra, need).leave(worker.holding))
    device = worker.device.id
    left = replace(worker, extra=None)
    worker = draft.set_worker(
        worker.id,
        holding=worker.extra,
        extra=None,
        ready=None,
        departure=None,
        grown_bytes=0,
        placement=Placement(Result.FREE, Allocation.FRACTIONAL, HOST, need),
        device=host,
    )
    release_when_free(draft, left)
    assert left.suspended is not None
    kv_cache_bytes = sum(item.bytes for item in left.suspended.ready.buffers if item.kind == "kv")
    retained = left.beat.cells_retained if left.beat else 0
    _mark_warm(draft, worker, Mechanism.CHECKPOINT, device, Offloaded(kv_cache_bytes, 0, retained))


def resume_ended(draft: Draft, event: CheckpointEnded) -> WorkerRecord | None:
    """The driver has resumed a worker; returns the ready worker, None after a failure."""
    worker = _under_way(draft, event.worker, _S.RESTORING)
    if worker is None or worker.suspended is None:
        return None
    if event.problem is not None:
        _end_unknown(draft, worker, "could not be resumed", event.problem, by_device_state=event.by_device_state)
        return None
    draft.cancel(TimerKind.WARM_POOL, worker.id)
    return worker


def _under_way(draft: Draft, id: str, state: ModelState) -> WorkerRecord | None:
    worker = draft.state.workers.get(id)
    if worker is None or not draft.is_current(worker) or draft.model(worker.model).state is not state:
        return None
    return worker


def _end_unknown(draft: Draft, worker: WorkerRecord, what: str, why: str, *, by_device_state: bool) -> None:
    """Ends a process that could not be suspended or resumed, because its state is unknown; its model becomes cold."""
    then = ""
    devices = draft.state.devices
    if not by_device_state:
        suspension = {**devices.suspension, worker.device.kind: f"{worker.model} {what}: {why}"}
        draft.set_devices(suspension=suspension)
        suspender = devices.suspenders.get(worker.device.kind, "the driver")
        then = f", and process checkpoints by {suspender} are no longer used"
    draft.warning(
        "%s (pid %s) %s: %s; its %s are released%s",
        worker.model, worker.pid, what, why,
        format_bytes(sum(draft.state.ledger.owned_by(worker.model).values())), then,
    )  # fmt: skip
    if worker.departure is not None:
        draft.set_worker(worker.id, departure=replace(worker.departure, action=Action.UNLOAD))
    draft.emit(StopWorker(worker.id))


# --- on the way out --------------------------------------------------------------------------------------------------
def restore(draft: Draft, id: str, placement: Placement) -> WorkerRecord:
    """Begins to restore a warm model at its placement; the rest is like a load."""
    model, worker = draft.model(id), draft.worker_of(id)
    assert worker is not None
    devices = device_view.named(draft.state, placement.devices, draft.now)
    booked = f"{id}#{draft.number()}"
    ledger = keeping.ledger_to_restore(draft.state, model).reserve(booked, id, placement.need)
    if keeping.mechanism(draft.state, model) is Mechanism.STANDBY:
        extra, holding = booked, worker.holding
        held = ledger.holdings[worker.holding].bytes
        whole = {name: count + held.get(name, 0) for name, count in placement.need.items()}
        placement = replace(placement, need=whole)
    else:
        extra, holding = worker.holding, booked
    draft.set(ledger=ledger)
    estimates = draft.state.estimates_of(model.effective)
    worker = draft.set_worker(
        worker.id,
        holding=holding,
        extra=extra,
        placement=placement,
        device=devices[0],
        began_at=draft.now,
        progress=0.0,
        limit=worker.limit if worker.suspended is not None else None,  # a resumed process still has it
        spec=model.effective,
        estimate=estimates.get(placement_key(placement.devices, placement.tensor_split), worker.estimate),
    )
    draft.advance(id, ModelEvent.RESTORE)
    draft.info("restoring %s on %s (pid %s)", id, ", ".join(placement.devices), worker.pid)
    if worker.suspended is not None:
        _checkpoint(draft, worker, "resume", sum(worker.suspended.need.values()))
        return worker
    order = grant_for(model.effective, devices, placement, kv_arenas.tiers(draft, worker.id))
    draft.emit(SendOrder(worker.id, replace(order, environment=dict(environment_of(devices)))))
    return worker


# --- deadlines -------------------------------------------------------------------------------------------------------
def step_is_late(draft: Draft, id: str) -> None:
    """A step of a worker into the warm pool or out of it took too long: the worker is killed."""
    worker = draft.worker(id)
    if not draft.is_current(worker) or draft.model(worker.model).state in (_S.OFFLOADING, _S.RESTORING):
        draft.emit(KillWorker(id, "it did not release or resume its model in time"))
