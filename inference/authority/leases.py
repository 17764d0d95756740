"""Tickets and leases: a request waits for a worker with a ticket, and uses it with a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from inference.authority.handlers.queries import expectations
from inference.authority.state import LeaseRecord, State
from inference.errors import InferenceError
from inference.protocol import Progress
from inference.workers.worker_process import WorkerProcess


class Issuer(Protocol):
    """The part of the authority that tickets and leases call."""

    @property
    def state(self) -> State:
        """The current state."""
        ...

    def withdraw(self, ticket: Ticket) -> None:
        """Removes a waiting ticket."""
        ...

    def release(self, lease: Lease, *, completed: bool) -> None:
        """A request has ended."""
        ...


class Lease:
    """The right to send one request to a worker, until `release`; later calls of it do nothing."""

    def __init__(
        self, authority: Issuer, record: LeaseRecord, process: WorkerProcess, devices: tuple[str, ...]
    ) -> None:
        self.record = record
        self.process = process
        self.devices = devices
        """the devices that the worker computes on"""
        self.shape: Callable[[], dict[str, Any]] = dict
        """describes the request for a crash record"""
        self._authority = authority
        self._open = True
        self._was_alone: bool | None = None

    @property
    def model(self) -> str:
        """The id of its model."""
        return self.record.model

    @property
    def alone(self) -> bool:
        """Whether this request keeps others out of the worker; after the end of the worker, whether it did so then."""
        if self._was_alone is not None:
            return self._was_alone
        worker = self._authority.state.workers.get(self.record.worker)
        return worker is not None and worker.alone == self.record.id

    def settle_alone(self) -> None:
        """Fixes `alone`, because the worker has ended."""
        self._was_alone = self.alone

    def release(self, *, completed: bool = False) -> None:
        """Ends the lease. `completed`: the worker's answer was complete."""
        if self._open:
            self._open = False
            self._authority.release(self, completed=completed)


class Ticket:
    """A request for a lease. Use it as a context manager: leaving gives up the place in the queue or the lease."""

    def __init__(self, authority: Issuer, id: int) -> None:
        self.id = id
        self._authority = authority
        self._future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()

    @property
    def pending(self) -> bool:
        """Whether the ticket is waiting."""
        return not self._future.done()

    def grant(self, lease: Lease) -> None:
        """Ends the wait with a lease."""
        if self._future.done():
            lease.release()
        else:
            self._future.set_result(lease)

    def fail(self, error: InferenceError) -> None:
        """Ends the wait with `error`."""
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # marks the exception as retrieved

    def refusal(self) -> InferenceError | None:
        """The error that ended the wait."""
        error = self._future.exception() if self._future.done() and not self._future.cancelled() else None
        return error if isinstance(error, InferenceError) else None

    async def wait(self, seconds: float | None = None) -> Lease | None:
        """The lease, or None after `seconds`; raises the InferenceError that ended the wait."""
        if not self._future.done():
            await asyncio.wait({self._future}, timeout=seconds)
        return self._future.result() if self._future.done() else None

    def progress(self) -> Progress:
        """The progress of the wait."""
        return expectations.progress(self._authority.state, self.id)

    def close(self) -> None:
        """Gives up the place in the queue, or releases the lease."""
        if not self._future.done():
            self._future.cancel()
            self._authority.withdraw(self)
        elif not self._future.cancelled() and self._future.exception() is None:
            self._future.result().release()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
