"""Queues and leases: who waits for a model, who has it, and what those are told who wait in vain.

Never loads or evicts anything; it tells the authority when something became idle.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from inference.authority.lifecycle.retry_after import (
    expected_load_seconds,
    load_seconds_left,
    queue_seconds,
    retry_after_seconds,
)
from inference.authority.lifecycle.transitions import Event
from inference.authority.lifecycle.wait_queue import ORDER
from inference.errors import DeadlineExceeded, InferenceError, ModelLoading
from inference.evictions import Reason
from inference.model import Lease, Model, Ticket
from inference.protocol import ModelState, Priority

if TYPE_CHECKING:
    from inference.authority.shell import Authority

log = logging.getLogger(__name__)

TELL_SECONDS = 0.2
"""How soon listeners hear that a queue is shorter; many leave together."""
_S, _E = ModelState, Event


class Waiting:
    """Tickets become leases here, or errors."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    def serve(self, model: Model) -> None:
        """Gives a lease to everybody who waits, unless one has to be alone; the engine queues from here on."""
        while model.queue.waiters:
            waiter = model.queue.waiters[0]
            if not self._authority.door.is_open(model, alone=waiter.alone):
                self._authority.door.lock(model)
                return
            ticket = self.unqueue(model, waiter.id)
            if ticket is not None and ticket.pending:
                ticket.grant(self.lease(model, counts=ticket.counts, alone=waiter.alone))

    def lease(self, model: Model, *, counts: bool, alone: bool = False) -> Lease:
        """One more request in flight on the model's worker, which is ready."""
        assert model.running is not None
        lease = Lease(model, model.running, self._released, counts=counts)
        model.running.leases.add(lease)
        self._authority.door.entered(lease, alone=alone)
        if counts:
            model.uses += 1
            model.last_used_at = self._authority.loop.time()
        if model.state is _S.READY:
            model.answered_at = self._authority.loop.time()
            self._authority.move(model, _E.USED, quietly=True)
        return lease

    def _released(self, lease: Lease, completed: bool) -> None:
        model, running = lease.model, lease.running
        running.leases.discard(lease)
        self._authority.door.left(lease)
        if model.running is not running:
            return
        if lease.counts:
            model.last_used_at = self._authority.loop.time()
        if completed:
            model.backoff = model.backoff.completed()
        if completed and lease.counts:
            now = self._authority.loop.time()
            model.pace, model.answered_at = model.pace.answered(now - model.answered_at), now
            model.prefill_tokens_per_second = self.prefill_rate(model)
        if running.leases:
            return
        if model.state is _S.BUSY:
            self._authority.move(model, _E.IDLE, quietly=True)
            if model.queue.waiters:
                self.serve(model)
            elif model.spec.idle_timeout == 0 and not model.spec.pinned:
                self._authority.loads.leave(model, Reason.IDLE, self._authority.warm.action(model))
        elif model.state is _S.DRAINING:
            self._authority.loads.unload(model)
        if any(other.queue.waiters for other in self._authority.models.values()):
            self._authority.pump()

    def give_up(self, ticket: Ticket) -> None:
        """The holder of a waiting ticket left; a load it began goes on."""
        self.unqueue(ticket.model, ticket.waiter.id)
        self._authority.teller.changed(TELL_SECONDS)
        self._nobody_left(ticket.model)

    def _nobody_left(self, model: Model) -> None:
        """Those who make room for it need not any more, and others may have been waiting behind it."""
        if not model.queue.waiters or model.state in (_S.READY, _S.BUSY):
            self._authority.pump()

    def unqueue(self, model: Model, waiter_id: int) -> Ticket | None:
        """Takes a waiter out of its queue; None when it does not wait any more."""
        model.queue = model.queue.remove(waiter_id)
        ticket = model.tickets.pop(waiter_id, None)
        if ticket is not None and ticket.timer is not None:
            ticket.timer.cancel()
        return ticket

    def expire(self, ticket: Ticket) -> None:
        """The deadline of a waiting ticket has passed."""
        model = ticket.model
        self.unqueue(model, ticket.waiter.id)
        waited = f"{model.id!r} could not be used within the {ticket.patience:.1f} s the request may wait"
        if model.state in (_S.LOADING, _S.RESTORING) and model.running is not None:
            self._authority.metrics.timeouts.labels("loading").inc()
            percent = int(model.running.worker.progress * 100)
            ticket.fail(
                ModelLoading(
                    f"{waited}: it is loading ({percent} %)",
                    retry_after=self.seconds_to_load(model),
                    details={"stage": "loading", "progress": percent},
                )
            )
        else:
            self._authority.metrics.timeouts.labels("queued").inc()
            ticket.fail(DeadlineExceeded(f"{waited}: it is {model.state}"))
        self._nobody_left(model)

    def put_off(self, seconds: float) -> None:
        """Nothing could be done for so long, because the service itself stood still: everybody may wait longer."""
        loop = self._authority.loop
        log.warning("the service stood still for %.1f s; whoever waits may wait as much longer", seconds)
        for model in self._authority.models.values():
            for ticket in model.tickets.values():
                if ticket.timer is not None:
                    due = ticket.timer.when() + seconds
                    ticket.timer.cancel()
                    ticket.timer = loop.call_at(due, self.expire, ticket)

    def fail(self, model: Model, error: InferenceError) -> None:
        """Ends the wait of everybody who waits for the model."""
        for waiter in model.queue.waiters:
            if ticket := self.unqueue(model, waiter.id):
                ticket.fail(error)

    def seconds_to_load(self, model: Model) -> float:
        """Retry-After for somebody who only has to wait until the model is there."""
        return retry_after_seconds(*self._room_and_load(model))

    def seconds_to_service(self, model: Model, priority: Priority) -> float:
        """Retry-After for somebody of `priority` who found the queue full: until those before him are served."""
        ahead = sum(ORDER.index(waiter.priority) <= ORDER.index(priority) for waiter in model.queue.waiters)
        return retry_after_seconds(*self._room_and_load(model), ahead, model.pace)

    def load_seconds(self, model: Model) -> float | None:
        """Seconds until the model could take a request, 0 when it is ready; None before anything was measured."""
        if model.state in (_S.READY, _S.BUSY):
            return 0.0
        if not model.loads and (self._authority.loads.bytes_per_second is None or not model.estimates):
            return None
        room, load = self._room_and_load(model)
        return max(0.0, room) + max(0.0, load)

    def queue_seconds(self, model: Model) -> float | None:
        """Seconds that somebody who comes now waits for others, once the model is ready; None while that is unknown."""
        return queue_seconds(model.in_flight + len(model.queue), model.effective.parallel, model.pace)

    @staticmethod
    def prefill_rate(model: Model) -> float | None:
        """Tokens per second at which its worker read prompts lately, or its last worker did; None before any."""
        beat = model.running.worker.beat if model.running is not None else None
        known = beat.prefill_tokens_per_second if beat is not None else None
        return model.prefill_tokens_per_second if known is None else known

    def _room_and_load(self, model: Model) -> tuple[float, float]:
        now = self._authority.loop.time()
        is_kept = model.state in (_S.WARM, _S.RESTORING) and model.restore_seconds is not None
        last = model.restore_seconds if is_kept and model.restore_seconds is not None else model.reload_seconds
        if not model.loads and (known := next(iter(model.estimates.values()), None)) is not None:
            last = expected_load_seconds(sum(known.need.values()), self._authority.loads.bytes_per_second)
        if model.running is not None and model.state in (_S.LOADING, _S.RESTORING):
            return 0.0, load_seconds_left(model.running.worker.progress, now - model.running.began_at, last)
        rest = model.retry_at - now if model.state is _S.FAILED else 0.0
        return max(rest, model.room_at - now), last
