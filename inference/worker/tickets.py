"""Carries outputs from the engine's thread to the request that waits for them; decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from inference.protocol import Progress
from inference.worker.errors import GoneError

T = TypeVar("T")

_PATIENCE_SECONDS = 3600.0


class Ticket(Generic[T]):
    """One request's mailbox on the event loop.

    From the engine's thread only `progress`, `sent` and `stalled` are written: the engine sets `stalled` when too much
    lies unread, and the reader clears it and calls `on_room` once it has read.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._outputs: list[T] = []
        self._waiter: asyncio.Future[None] | None = None
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

    def put(self, output: T) -> None:
        """Adds an output; on the event loop only."""
        self._outputs.append(output)
        self._wake()

    def leave(self) -> None:
        """The client left: wakes whoever waits."""
        self.gone = True
        self._wake()

    async def take(self, seconds: float) -> list[T]:
        """Everything that arrived, waiting at most `seconds` for the first; empty after that time or when gone."""
        if not self._outputs and not self.gone:
            self._waiter = self._loop.create_future()
            timer = self._loop.call_later(seconds, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        outputs, self._outputs = self._outputs, []
        self.read += len(outputs)
        if outputs and self.stalled:
            self.stalled = False
            if self.on_room is not None:
                self.on_room()
        return outputs

    async def next(self) -> list[T]:
        """Outputs, however long they take: the engine ends every request. Raises GoneError when the client left."""
        outputs = await self.take(_PATIENCE_SECONDS)
        if self.gone:
            raise GoneError
        return outputs

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Courier:
    """Delivers what one step produced with a single wake-up of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def deliver(self, batch: list[tuple[Ticket[Any], Any]]) -> None:
        """Called on the engine's thread; a loop that has ended takes nothing any more."""
        if batch and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_hand_out, batch)


def _hand_out(batch: Iterable[tuple[Ticket[Any], Any]]) -> None:
    for ticket, output in batch:
        ticket.put(output)
