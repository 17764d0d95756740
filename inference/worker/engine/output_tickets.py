"""Transfers outputs from the engine thread to the requests on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from inference.protocol import Progress
from inference.worker.worker_errors import GoneError

log = logging.getLogger("headgate.worker.tickets")

T = TypeVar("T")

_MAX_WAIT_SECONDS = 3600.0


class Ticket(Generic[T]):
    """The outputs of one request. Used on the event loop, except for three attributes of the engine thread.

    The engine thread writes `progress`, `sent` and `stalled`. It sets `stalled` when too many outputs are unread; the
    reader clears it and calls `on_room` after it has read.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._outputs: list[T] = []
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_output_at = 0.0
        self.gone = False
        """The client has disconnected; the outputs are not read."""
        self.held: object = None
        """A reference that must live until the request ends, such as its images."""
        self.progress: Progress | None = None
        """What the request waits for; may lag by one step."""
        self.sent = 0
        """Number of sent outputs, without the last one of each choice."""
        self.read = 0
        """Number of outputs read."""
        self.stalled = False
        self.on_room: Callable[[], None] | None = None
        self.on_arrival: Callable[[T], bool] | None = None
        """Called with an output that arrives during `take`. True: the output is read, and `take` goes on waiting."""

    def put(self, output: T) -> None:
        """Adds an output; on the event loop only."""
        waiter = self._waiter
        if waiter is not None and self.on_arrival is not None and not waiter.done() and self._reads(output):
            self._last_output_at = self._loop.time()
            self._note_read(1)
            return
        self._outputs.append(output)
        self._wake()

    def leave(self) -> None:
        """Marks the client as disconnected and wakes `take`."""
        self.gone = True
        self._wake()

    async def take(self, seconds: float) -> list[T]:
        """Returns all outputs that have arrived; waits for one if there are none.

        Returns an empty list after `seconds` without an output, or when the client has disconnected. A single timer
        serves the whole wait, also when `on_arrival` reads outputs in between.
        """
        if not self._outputs and not self.gone:
            self._waiter = self._loop.create_future()
            self._last_output_at = self._loop.time()
            self._timer = self._loop.call_later(seconds, self._look, seconds)
            try:
                await self._waiter
            finally:
                self._timer.cancel()
                self._timer = self._waiter = None
        outputs, self._outputs = self._outputs, []
        self._note_read(len(outputs))
        return outputs

    async def next(self) -> list[T]:
        """Waits for outputs without a deadline of its own, because the engine ends every request. Raises GoneError."""
        outputs = await self.take(_MAX_WAIT_SECONDS)
        if self.gone:
            raise GoneError
        return outputs

    def _reads(self, output: T) -> bool:
        """Whether `on_arrival` has read the output. After an exception the waiting task reads it and meets it again."""
        assert self.on_arrival is not None
        try:
            return self.on_arrival(output)
        except Exception:
            log.debug("an output could not be read on arrival", exc_info=True)
            return False

    def _note_read(self, count: int) -> None:
        self.read += count
        if count and self.stalled:
            self.stalled = False
            if self.on_room is not None:
                self.on_room()

    def _look(self, seconds: float) -> None:
        left = self._last_output_at + seconds - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look, seconds)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class OutputDispatcher:
    """Delivers the outputs of one step with a single wake-up of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def deliver(self, batch: list[tuple[Ticket[Any], Any]]) -> None:
        """Delivers a batch from the engine thread; does nothing once the event loop is closed."""
        if batch and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_put_all, batch)


def _put_all(batch: Iterable[tuple[Ticket[Any], Any]]) -> None:
    for ticket, output in batch:
        ticket.put(output)
