"""Turns tickets into leases or errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from inference.authority.draft import SETTLE_SECONDS, Draft
from inference.authority.effects import Fail, GrantLease
from inference.authority.handlers.running import replicas
from inference.authority.lifecycle import ACCEPTING, ModelEvent
from inference.authority.state import LeaseRecord, Purpose, TicketRecord, TimerKind, WorkerRecord
from inference.errors import InferenceError
from inference.protocol import ModelState, Priority


def is_open(worker: WorkerRecord, *, alone: bool) -> bool:
    """Whether the first request of the queue may be sent to the worker now."""
    return worker.alone is None and not (alone and worker.leases)


def queue(draft: Draft, ticket: TicketRecord, deadline_at: float, limits: Mapping[Priority, int] | None = None) -> None:
    """Adds a ticket to the queue of its model. Raises QueueFullError."""
    model, waiter = draft.model(ticket.model), ticket.waiter
    waiting = model.queue.push(waiter, limits)
    draft.set_model(model.id, queue=waiting, wanted_at=model.wanted_at if model.queue.waiters else draft.now)
    draft.set(tickets={**draft.state.tickets, ticket.id: ticket})
    draft.changed(SETTLE_SECONDS)
    if math.isfinite(deadline_at):
        draft.timer(TimerKind.TICKET, ticket.id, deadline_at)
    draft.plan()


def serve(draft: Draft, model: str) -> None:
    """Grants leases to all tickets of a ready model, unless one must run alone. The engine queues from here on."""
    _take_over(draft, model)
    while draft.model(model).queue.waiters:
        waiter = draft.model(model).queue.waiters[0]
        worker = draft.worker_of(model)
        assert worker is not None
        if not is_open(worker, alone=waiter.alone):
            _limit_alone(draft, worker)
            return
        grant(draft, unqueue(draft, waiter.id))


def grant(draft: Draft, ticket: TicketRecord) -> None:
    """Ends the wait of a ticket whose model is ready."""
    if ticket.purpose is not Purpose.CLIENT:
        draft.settled.append((ticket, None))
        return
    worker = draft.worker_of(ticket.model)
    assert worker is not None
    lease = LeaseRecord(draft.number(), ticket.model, worker.id, ticket.counts_as_use)
    is_alone = ticket.waiter.alone and not worker.leases
    draft.cancel(TimerKind.ALONE, worker.id)
    worker = draft.set_worker(
        worker.id,
        leases={**worker.leases, lease.id: lease},
        alone=lease.id if is_alone else worker.alone,
        active_at=draft.now,
    )
    if is_alone:
        _limit_alone(draft, worker)
    model = draft.model(ticket.model)
    if lease.counts_as_use:
        model = draft.set_model(model.id, uses=model.uses + 1, last_used_at=draft.now)
    if ticket.conversation is not None and ticket.movable:
        replicas.note_served(draft, model, ticket.conversation)
    if model.state is ModelState.READY:
        draft.set_model(model.id, answered_at=draft.now)
        draft.advance(model.id, ModelEvent.USED, quietly=True)
    draft.emit(GrantLease(ticket.id, lease))


def unqueue(draft: Draft, id: int) -> TicketRecord:
    """Removes a ticket from its queue."""
    ticket = draft.state.tickets[id]
    draft.set(tickets={name: other for name, other in draft.state.tickets.items() if name != id})
    model = draft.state.models.get(ticket.model)
    if model is not None:
        model = draft.set_model(ticket.model, queue=model.queue.remove(id))
        worker = draft.state.worker_of(model)
        waits_alone = bool(model.queue.waiters) and model.queue.waiters[0].alone
        if worker is not None and worker.alone is None and not waits_alone:
            draft.cancel(TimerKind.ALONE, worker.id)
    draft.cancel(TimerKind.TICKET, id)
    return ticket


def refuse(draft: Draft, ticket: TicketRecord, error: InferenceError) -> None:
    """Ends the wait of a ticket outside of queues with an error."""
    if ticket.purpose is Purpose.CLIENT:
        draft.emit(Fail(ticket.id, error))
    else:
        draft.settled.append((ticket, error))


def fail(draft: Draft, model: str, error: InferenceError) -> None:
    """Ends the wait of every ticket of the model; requests that another replica can serve wait there."""
    move_to_others(draft, model)
    for waiter in draft.model(model).queue.waiters:
        refuse(draft, unqueue(draft, waiter.id), error)


def move_to_others(draft: Draft, model: str) -> None:
    """The waiting requests of a replica that cannot serve them go to another one that is loaded or loading, if any.

    Requests that must run alone stay, because they may end the worker of the other replica too.
    """
    record = draft.model(model)
    if draft.state.closing or not replicas.has_replicas(record):
        return
    for waiter in record.queue.waiters:
        is_movable = draft.state.tickets[waiter.id].movable and not waiter.alone
        place = replicas.refuge(draft.state, record, draft.now) if is_movable else None
        if place is not None:
            _move(draft, waiter.id, place)


def _take_over(draft: Draft, model: str) -> None:
    """A ready replica takes the waiting requests of others that it would serve before them."""
    record = draft.model(model)
    if record.state not in ACCEPTING or not replicas.has_replicas(record):
        return
    for other in replicas.replicas_of(draft.state, record):
        for waiter in other.queue.waiters if other.state not in ACCEPTING else ():
            is_movable = draft.state.tickets[waiter.id].movable and not waiter.alone
            if is_movable and replicas.serves_before(draft.state, draft.model(model), other, draft.now):
                _move(draft, waiter.id, model)


def _move(draft: Draft, id: int, to: str) -> None:
    """A ticket waits for another replica until its deadline, or is granted there."""
    deadline_at = draft.state.timers.get((TimerKind.TICKET, id), math.inf)
    ticket = unqueue(draft, id)
    draft.debug("a request for %s goes to %s", ticket.model, to)
    ticket = replace(ticket, model=to)
    model, worker = draft.model(to), draft.worker_of(to)
    is_free = model.state in ACCEPTING and worker is not None and not worker.ending and not model.queue.waiters
    if is_free and worker is not None and is_open(worker, alone=ticket.waiter.alone):
        grant(draft, ticket)
    else:
        queue(draft, ticket, deadline_at)


def forget_lease(draft: Draft, worker: WorkerRecord, lease: int) -> WorkerRecord:
    """Removes a request that is no longer in flight on a worker."""
    leases = {id: other for id, other in worker.leases.items() if id != lease}
    if worker.alone != lease:
        return draft.set_worker(worker.id, leases=leases, active_at=draft.now)
    draft.cancel(TimerKind.ALONE, worker.id)
    return draft.set_worker(worker.id, leases=leases, active_at=draft.now, alone=None)


def _limit_alone(draft: Draft, worker: WorkerRecord) -> None:
    """Starts the time limit of a request that runs alone or waits to."""
    if (TimerKind.ALONE, worker.id) not in draft.state.timers:
        draft.timer(TimerKind.ALONE, worker.id, draft.now + draft.state.timing.alone_seconds)


def alone_is_over(draft: Draft, id: str) -> None:
    """The time limit of a request that runs alone or waits to is over: others may run beside it."""
    worker = draft.state.workers.get(id)
    if worker is None or worker.ending or not draft.is_current(worker):
        return
    model = draft.model(worker.model)
    if worker.alone is not None:
        draft.set_worker(id, alone=None)
    elif model.queue.waiters and model.queue.waiters[0].alone:
        first = model.queue.waiters[0].id
        queue = model.queue.clear_alone(first)
        ticket = replace(draft.state.tickets[first], waiter=queue.waiters[0])
        draft.set(tickets={**draft.state.tickets, first: ticket})
        draft.set_model(model.id, queue=queue)
    if model.state in ACCEPTING:
        serve(draft, model.id)
