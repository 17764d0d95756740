"""Expected waiting times of requests, from measurements."""

from __future__ import annotations

from inference.authority.lifecycle import ACCEPTING
from inference.authority.state import ModelRecord, State
from inference.authority.wait_queue import (
    ORDER,
    expected_load_seconds,
    load_seconds_left,
    retry_after_seconds,
)
from inference.authority.wait_queue import queue_seconds as queue_wait
from inference.protocol import ModelState, Priority, Progress

_S = ModelState


def retry_after_load(state: State, model: ModelRecord, now: float) -> float:
    """Retry-After for a request that waits for the load only."""
    return retry_after_seconds(*_room_and_load(state, model, now))


def retry_after_full_queue(state: State, model: ModelRecord, priority: Priority, now: float) -> float:
    """Retry-After for a request of `priority` that a full queue rejected."""
    ahead = sum(ORDER.index(waiter.priority) <= ORDER.index(priority) for waiter in model.queue.waiters)
    return retry_after_seconds(*_room_and_load(state, model, now), ahead, model.pace)


def load_seconds(state: State, model: ModelRecord, now: float) -> float | None:
    """Seconds until the model can take a request (0 if ready); None without measurements."""
    if model.state in ACCEPTING:
        return 0.0
    if not model.loads and (state.bytes_per_second is None or not state.estimates_of(model.effective)):
        return None
    room, load = _room_and_load(state, model, now)
    return max(0.0, room) + max(0.0, load)


def queue_seconds(state: State, model: ModelRecord) -> float | None:
    """Seconds that a new request waits for others after the load; None if unknown."""
    return queue_wait(state.in_flight(model) + len(model.queue), model.effective.parallel, model.pace)


def prefill_rate(state: State, model: ModelRecord) -> float | None:
    """Recent prefill rate of the current or last worker in tokens per second; None without any."""
    worker = state.worker_of(model)
    known = worker.beat.prefill_tokens_per_second if worker is not None and worker.beat is not None else None
    return model.prefill_tokens_per_second if known is None else known


def _room_and_load(state: State, model: ModelRecord, now: float) -> tuple[float, float]:
    worker = state.worker_of(model)
    is_kept = model.state in (_S.WARM, _S.RESTORING) and model.restore_seconds is not None
    last = model.restore_seconds if is_kept and model.restore_seconds is not None else model.reload_seconds
    known = next(iter(state.estimates_of(model.effective).values()), None)
    if not model.loads and known is not None:
        last = expected_load_seconds(sum(known.need.values()), state.bytes_per_second)
    if worker is not None and model.state in (_S.LOADING, _S.RESTORING):
        return 0.0, load_seconds_left(worker.progress, now - worker.began_at, last)
    rest = model.retry_at - now if model.state is _S.FAILED else 0.0
    return max(rest, model.room_at - now), last


def progress(state: State, ticket: int) -> Progress:
    """The progress of a ticket: its place in the queue, or the load."""
    record = state.tickets.get(ticket)
    model = None if record is None else state.models.get(record.model)
    if record is None or model is None:
        return Progress("queued", 0)
    worker = state.worker_of(model)
    if worker is not None and model.state in (_S.LOADING, _S.RESTORING):
        return Progress("loading", int(worker.progress * 100), 100)
    return Progress("queued", model.queue.position(record.waiter.id) or 0)
