"""Departure of a model from its worker: drain, then warm pool or unload."""

from __future__ import annotations

from dataclasses import replace

from inference.authority.draft import Draft
from inference.authority.effects import StopWorker
from inference.authority.handlers.running import endings, tickets, warm_pool
from inference.authority.lifecycle import ACCEPTING, Action, Departure, ModelEvent, Reason
from inference.authority.state import State, TimerKind, WorkerRecord
from inference.protocol import ModelState

_S = ModelState


def leave(
    draft: Draft,
    id: str,
    reason: Reason,
    action: Action = Action.UNLOAD,
    explanation: tuple[str, ...] = (),
    wanted_by: str = "",
) -> None:
    """Makes a model leave after its running requests. The departure is recorded when the memory is free.

    A stronger reason replaces the reason of a model that is already leaving.
    """
    model, worker = draft.model(id), draft.worker_of(id)
    if worker is None or worker.ending or model.state is _S.UNLOADING:
        return
    departure = Departure(reason, action, explanation, wanted_by)
    why = "; ".join((str(reason), *explanation))
    if model.state is _S.DRAINING:
        if worker.departure is not None and not departure.overrules(worker.departure):
            return
        draft.info("draining %s continues for another reason (%s)", id, why)
        draft.set_worker(worker.id, departure=departure)
    elif model.state not in ACCEPTING:
        draft.info("unloading %s, which is %s (%s)", id, model.state, why)
        endings.end(draft, id, replace(departure, action=Action.UNLOAD))
        return
    else:
        draft.set_worker(worker.id, departure=departure)
        draft.info("draining %s (%s)", id, why)
        draft.advance(id, ModelEvent.DRAIN)
    if not draft.worker(worker.id).leases:
        unload_or_keep(draft, id)


def stop_in(draft: Draft, id: str, seconds: float) -> None:
    """Limits the time of a leaving model for its running requests."""
    worker = draft.worker_of(id)
    if worker is not None:
        at = draft.now + seconds
        if draft.state.timers.get((TimerKind.STOP, worker.id), at + 1) > at:
            draft.timer(TimerKind.STOP, worker.id, at)


def stop_time_is_over(draft: Draft, id: str) -> None:
    """The time of a leaving model for its running requests is over."""
    worker = draft.state.workers.get(id)
    if worker is not None and draft.is_current(worker) and draft.model(worker.model).state is _S.DRAINING:
        draft.emit(StopWorker(id))


def stay(draft: Draft, id: str) -> None:
    """Cancels `leave`, because its reason has disappeared."""
    worker = draft.worker_of(id)
    assert worker is not None
    draft.info("%s is kept: it need not leave any more", id)
    draft.set_worker(worker.id, departure=None, has_waited=False, room_awaited=())
    draft.cancel(TimerKind.STOP, worker.id)
    draft.cancel(TimerKind.ROOM_TO_KEEP, worker.id)
    draft.advance(id, ModelEvent.STAY)
    tickets.serve(draft, id)
    if not draft.worker(worker.id).leases:
        draft.advance(id, ModelEvent.IDLE)


def unload_or_keep(draft: Draft, id: str) -> None:
    """After the last request: moves the model into the warm pool if decided and possible, else ends its worker."""
    worker = draft.worker_of(id)
    assert worker is not None
    departure = worker.departure
    if departure is not None and departure.action is Action.OFFLOAD and draft.model(id).state is _S.DRAINING:
        if id not in draft.checked_files:
            draft.plan()
            return
        if warm_pool.begin(draft, id):
            return
        departure = replace(departure, action=Action.UNLOAD)
    endings.end(draft, id, departure)


def advance(draft: Draft) -> None:
    """Continues departures that waited for a check of the model's files, or for dropped models to end."""
    for worker in list(draft.state.workers.values()):
        if worker.room_awaited and not any(other in draft.state.workers for other in worker.room_awaited):
            room_wait_is_over(draft, worker.id)
        elif worker.model in draft.checked_files and may_be_kept(draft.state, worker):
            unload_or_keep(draft, worker.model)


def room_wait_is_over(draft: Draft, id: str) -> None:
    """The wait of a departing model for room in the warm pool is over."""
    worker = draft.state.workers.get(id)
    draft.cancel(TimerKind.ROOM_TO_KEEP, id)
    if worker is None:
        return
    worker = draft.set_worker(id, room_awaited=())
    if _is_drained(draft.state, worker):
        unload_or_keep(draft, worker.model)


def _is_drained(state: State, worker: WorkerRecord) -> bool:
    model = state.models.get(worker.model)
    is_current = model is not None and model.worker == worker.id and model.state is _S.DRAINING
    return is_current and not worker.leases and not worker.ending


def may_be_kept(state: State, worker: WorkerRecord) -> bool:
    """Whether a drained model is to be kept, if its files did not change."""
    is_kept = worker.departure is not None and worker.departure.action is Action.OFFLOAD
    return is_kept and not worker.room_awaited and _is_drained(state, worker)
