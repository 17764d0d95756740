"""Carries outputs from the engine's thread to the request that waits for them; decides nothing."""

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
    """One request's mailbox on the event loop.

    From the engine's thread only `progress`, `sent` and `stalled` are written: the engine sets `stalled` when too much
    lies unread, and the reader clears it and calls `on_room` once it has read.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._outputs: list[T] = []
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_output_at = 0.0
        self.gone = False
        """The client left; nobody reads any more."""
        self.held: object = None
        """What must live as long as anybody computes this request."""
        self.progress: Progress | None = None
        """What the request waits for; may be a step old."""
        self.sent = 0
        """Outputs on their way or here, the last of each choice not counted."""
        self.read = 0
        """Outputs taken."""
        self.stalled = False
        self.on_room: Callable[[], None] | None = None
        self.on_arrival: Callable[[T], bool] | None = None
        """Asked about an output that comes while somebody waits in `take`: what it reads, with True, wakes nobody."""

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
        """The client left: wakes whoever waits."""
        self.gone = True
        self._wake()

    async def take(self, seconds: float) -> list[T]:
        """Everything that arrived, waiting until there was nothing for `seconds`; empty after that time or when gone.

        One timer serves the whole wait: what `on_arrival` reads moves a number only.
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
        """Outputs, however long they take: the engine ends every request. Raises GoneError when the client left."""
        outputs = await self.take(_MAX_WAIT_SECONDS)
        if self.gone:
            raise GoneError
        return outputs

    def _reads(self, output: T) -> bool:
        """Whether `on_arrival` took the output. What goes wrong there concerns this request alone, and whoever waits
        meets it again.
        """
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
    """Delivers what one step produced with a single wake-up of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def deliver(self, batch: list[tuple[Ticket[Any], Any]]) -> None:
        """Called on the engine's thread; a loop that has ended takes nothing any more."""
        if batch and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_put_all, batch)


def _put_all(batch: Iterable[tuple[Ticket[Any], Any]]) -> None:
    for ticket, output in batch:
        ticket.put(output)
