"""Requests for models: queue, lease, end, deadlines, and requests that are suspected of ending their workers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from inference.authority.draft import SETTLE_SECONDS, Draft
from inference.authority.events import CaseCleared, CrashReported, Released, RequestAnswered, Wanted, Withdrawn
from inference.authority.handlers.queries import expectations
from inference.authority.handlers.running import (
    departure,
    device_incidents,
    keeping,
    replicas,
    tickets,
)
from inference.authority.lifecycle import ACCEPTING, ModelEvent, Reason
from inference.authority.placement.plan import Result
from inference.authority.quarantine import Suspicion
from inference.authority.state import ModelRecord, Purpose, State, TicketRecord, TimerKind
from inference.authority.wait_queue import QueueFullError, Waiter
from inference.errors import DeadlineExceeded, InferenceError, ModelLoading, ModelNotFound, QueueFull, ShuttingDown
from inference.protocol import FULL_FOR, ModelState, Priority

_S = ModelState
MAX_REJECTIONS = 1000


def wanted(draft: Draft, event: Wanted) -> None:
    """A request for a model gets a lease, a place in the queue, or an error."""
    state, model = draft.state, draft.state.models.get(event.model)
    is_movable = event.any_replica and model is not None and replicas.is_first_of_several(model)
    if is_movable and model is not None and not model.removed:
        model = state.models[replicas.choose(state, model, event, draft.now)]
    wait_seconds = min(state.settings.acquire_timeout_seconds, math.inf if event.seconds is None else event.seconds)
    waiter = Waiter(event.ticket, event.priority, draft.now, event.alone)
    ticket = TicketRecord(
        event.ticket,
        event.model if model is None else model.id,
        waiter,
        wait_seconds,
        event.counts_as_use,
        event.purpose,
        event.conversation,
        movable=is_movable,
        evicts=event.evicts,
    )
    if state.closing:
        tickets.refuse(draft, ticket, ShuttingDown())
        return
    if model is None or model.removed:
        tickets.refuse(draft, ticket, ModelNotFound(event.model, sorted(state.config.model_ids)))
        return
    worker = state.worker_of(model)
    is_ready = model.state in ACCEPTING and worker is not None and not model.queue.waiters
    if is_ready and worker is not None and not worker.ending and tickets.is_open(worker, alone=event.alone):
        draft.count("placements", Result.DEPLOYED.lower(), "ready")
        tickets.grant(draft, ticket)
        return
    try:
        limits = None if event.retries else state.settings.queue_limits
        tickets.queue(draft, ticket, draft.now + wait_seconds, limits)
    except QueueFullError:
        tickets.refuse(draft, ticket, _queue_full(draft, model, event.priority))


def _queue_full(draft: Draft, model: ModelRecord, priority: Priority) -> QueueFull:
    advice = draft.state.advice
    rejection = (draft.now, priority, draft.state.settings.queue_limits[priority])
    rejections = (*advice.rejections, rejection)[-MAX_REJECTIONS:]
    draft.set(advice=replace(advice, rejections=rejections))
    return QueueFull(
        f"{model.queue.count(priority)} requests of {priority} priority are already waiting for {model.id!r}; "
        f"try again later, or raise INFERENCE_QUEUE_{priority.upper()}",
        retry_after=expectations.retry_after_full_queue(draft.state, model, priority, draft.now),
        details={FULL_FOR: [priority]},
    )


def withdrawn(draft: Draft, event: Withdrawn) -> None:
    """The client of a waiting ticket has disconnected; a load continues."""
    if event.ticket in draft.state.tickets:
        tickets.unqueue(draft, event.ticket)
        draft.changed(SETTLE_SECONDS)
        draft.plan()


def expired(draft: Draft, id: int) -> None:
    """The deadline of a waiting ticket was reached."""
    if id not in draft.state.tickets:
        return
    ticket = tickets.unqueue(draft, id)
    model, worker = draft.model(ticket.model), draft.worker_of(ticket.model)
    waited = f"{model.id!r} was not available within the {ticket.wait_seconds:.1f} s that the request may wait"
    if model.state in (_S.LOADING, _S.RESTORING) and worker is not None:
        draft.count("timeouts", "loading")
        percent = int(worker.progress * 100)
        error: InferenceError = ModelLoading(
            f"{waited}: it is loading ({percent} %)",
            retry_after=expectations.retry_after_load(draft.state, model, draft.now),
            details={"stage": "loading", "progress": percent},
        )
    else:
        draft.count("timeouts", "queued")
        error = DeadlineExceeded(f"{waited}: it is {model.state}")
    tickets.refuse(draft, ticket, error)
    draft.plan()


def extend_deadlines(draft: Draft, seconds: float) -> None:
    """Extends the deadlines of waiting requests by a pause in which the service did not run."""
    draft.warning("the service did not run for %.1f s; extending the deadlines of waiting requests", seconds)
    timers = {timer: at + seconds if timer[0] is TimerKind.TICKET else at for timer, at in draft.state.timers.items()}
    draft.set(timers=timers)
    draft.retime = True


def released(draft: Draft, event: Released) -> None:
    """A request has ended."""
    worker = draft.state.workers.get(event.worker)
    lease = None if worker is None else worker.leases.get(event.lease)
    if worker is None or lease is None:
        return
    worker = tickets.forget_lease(draft, worker, lease.id)
    if not draft.is_current(worker):
        return
    model = draft.model(worker.model)
    changes: dict[str, object] = {}
    if lease.counts_as_use:
        changes["last_used_at"] = draft.now
    if event.completed and model.backoff.failures:
        changes["backoff"] = model.backoff.completed()
    if event.completed and lease.counts_as_use:
        changes["pace"] = model.pace.answered(draft.now - model.answered_at)
        changes["answered_at"] = draft.now
        changes["prefill_tokens_per_second"] = expectations.prefill_rate(draft.state, model)
    if changes:
        model = draft.set_model(model.id, **changes)
    if worker.leases or worker.ending:
        return
    if model.state is _S.BUSY:
        draft.advance(model.id, ModelEvent.IDLE, quietly=True)
        if model.queue.waiters:
            tickets.serve(draft, model.id)
        elif model.spec.idle_timeout == 0 and not model.spec.pinned:
            departure.leave(draft, model.id, Reason.IDLE, keeping.action_of(draft.state, draft.model(model.id)))
    elif model.state is _S.DRAINING:
        departure.unload_or_keep(draft, model.id)


def idle_models_leave(draft: Draft) -> None:
    """Models that are idle for their idle_timeout leave; failed models become cold after their backoff."""
    for model in list(draft.state.models.values()):
        if model.queue.waiters:
            continue
        if model.state is _S.FAILED and draft.now >= model.retry_at and not model.checking_build:
            draft.advance(model.id, ModelEvent.RETRY)
        is_idle = model.state is _S.READY and not draft.state.in_flight(model) and not model.spec.pinned
        if is_idle and draft.now - replicas.last_used_at(draft.state, model) >= model.spec.idle_timeout:
            departure.leave(draft, model.id, Reason.IDLE, keeping.action_of(draft.state, model))


def reload_lost(draft: Draft) -> None:
    """Loads models again that were in use when their device was lost, after all other requests."""
    names = draft.state.reloads
    draft.set(reloads=())
    for name in dict.fromkeys(names):
        model = draft.state.models.get(name)
        is_waiting = any(
            ticket.model == name and ticket.purpose is Purpose.RELOAD for ticket in draft.state.tickets.values()
        )
        if model is not None and not model.removed and not draft.state.closing and not is_waiting:
            wanted(draft, Wanted(draft.number(), name, Priority.LOW, counts_as_use=False, purpose=Purpose.RELOAD))


def reload_settled(draft: Draft, ticket: TicketRecord, error: InferenceError | None) -> None:
    """A model that lost its device was loaded again, or the load failed."""
    if error is None:
        device_incidents.loaded_again(draft, ticket.model)
    else:
        draft.info("%s is not loaded again: %s", ticket.model, error.message)


def stop_accepting(draft: Draft, error: InferenceError | None = None) -> None:
    """The service is shutting down: all waiting requests fail."""
    draft.set(closing=True)
    for model in draft.state.models:
        tickets.fail(draft, model, error or ShuttingDown())


# --- quarantine ------------------------------------------------------------------------------------------------------
def _quarantined(state: State, id: str) -> ModelRecord | None:
    """The record with the quarantine of all replicas of a model; None if the model was removed."""
    model = state.models.get(id)
    return None if model is None else replicas.first_of(state, model)


def crash_reported(draft: Draft, event: CrashReported) -> None:
    """A worker crashed while a request was in flight."""
    model = _quarantined(draft.state, event.model)
    if model is None:
        return
    quarantine = model.quarantine.crashed(event.key, event.crash, draft.now)
    draft.set_model(model.id, quarantine=quarantine)
    draft.warning(
        "a worker of %s ended with request %s%s: %s; suspicion of the request: %s",
        model.id, event.key, ", which ran alone" if event.crash.alone else "", event.crash.message,
        quarantine.suspicion(event.key, draft.now),
    )  # fmt: skip


def request_answered(draft: Draft, event: RequestAnswered) -> None:
    """A request was answered, and the worker is alive."""
    if event.crashes:
        draft.count("recoveries", "rerun")
    model = _quarantined(draft.state, event.model)
    if model is None:
        return
    quarantine = model.quarantine
    if not quarantine.cases and not quarantine.in_a_row and not quarantine.doubted:
        return
    if quarantine.suspicion(event.key, draft.now) is not Suspicion.NONE:
        draft.info("request %s (model %s) is no longer suspected", event.key, model.id)
    draft.set_model(model.id, quarantine=quarantine.answered(event.key))


def case_cleared(draft: Draft, event: CaseCleared) -> None:
    """An operator removed a request from quarantine."""
    model = _quarantined(draft.state, event.model)
    if model is not None:
        draft.set_model(model.id, quarantine=model.quarantine.forget(event.key))
        draft.info("an operator removed request %s (model %s) from quarantine", event.key, model.id)


def cases(state: State, now: float) -> list[dict[str, Any]]:
    """All current cases by model, in the order of their last crash; times in seconds."""
    return [
        {
            "key": key,
            "model": model.id,
            "suspicion": str(case.suspicion),
            "crashes": case.crashes,
            "cause": str(case.cause),
            "message": case.message,
            "age_seconds": round(now - case.since, 3),
            "seconds_left": round(case.until - now, 3),
        }
        for model in state.models.values()
        for key, case in model.quarantine.cases.items()
        if model.quarantine.suspicion(key, now) is not Suspicion.NONE
    ]
