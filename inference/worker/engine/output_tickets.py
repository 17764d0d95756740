"""Transfers outputs from the engine thread to the requests on the event loop.

Each delivered output costs time in every process on its way. Text that may wait is therefore joined with the next text
of its choice. It is sent with the end of its choice, or earlier if the next step would end after its due time.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from inference.protocol import Progress, Restored
from inference.worker.answers.generation import Output
from inference.worker.worker_errors import GoneError

log = logging.getLogger("headgate.worker.tickets")

T = TypeVar("T")

_MAX_WAIT_SECONDS = 3600.0


class Ticket(Generic[T]):
    """The outputs of one request. Used on the event loop, except for six attributes of the engine thread.

    The engine thread writes `progress`, `restored`, `begun_at`, `prefilled_at`, `sent` and `stalled`. It sets `stalled`
    when too many outputs are unread; the reader clears it and calls `on_room` after it has read.
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
        self.restored: list[Restored] = []
        """Restores of its choices, each added before the first output of the choice. The reader removes them."""
        self.begun_at: float | None = None
        """When the first step with tokens of the request began, on the engine's clock."""
        self.prefilled_at: float | None = None
        """When the prompt of its last choice was computed."""
        self.sent = 0
        """Number of sent outputs, without the last one of each choice."""
        self.read = 0
        """Number of outputs read."""
        self.stalled = False
        self.on_room: Callable[[], None] | None = None
        self.on_arrival: Callable[[T], bool] | None = None
        """Called with an output that arrives during `take`. True: the output is read, and `take` continues waiting."""

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
            self._timer = self._loop.call_later(seconds, self._check_wait, seconds)
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
        """Whether `on_arrival` has read the output. If that fails, the waiting task reads the output."""
        assert self.on_arrival is not None
        try:
            return self.on_arrival(output)
        except Exception:
            log.debug("`on_arrival` failed; the waiting task reads the output", exc_info=True)
            return False

    def _note_read(self, count: int) -> None:
        self.read += count
        if count and self.stalled:
            self.stalled = False
            if self.on_room is not None:
                self.on_room()

    def _check_wait(self, seconds: float) -> None:
        left = self._last_output_at + seconds - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_wait, seconds)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


Delivery = tuple[Ticket[Output], Output]


class Outbox:
    """Collects the outputs of steps on the engine thread. Outputs of one choice are delivered in order."""

    def __init__(self) -> None:
        self._ready: list[Delivery] = []
        self._waiting: dict[tuple[Ticket[Output], int], tuple[float, Output]] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether an output waits to be joined."""
        return bool(self._waiting)

    def put(self, ticket: Ticket[Output], output: Output) -> None:
        """Adds an output to the next delivery, together with the waiting output of its choice."""
        _due, before = self._waiting.pop((ticket, output.choice), (math.inf, None))
        if before is not None and output.error is not None:
            self._ready.append((ticket, before))
        elif before is not None:
            output = before.joined(output)
        self._ready.append((ticket, output))

    def hold(self, ticket: Ticket[Output], output: Output, due: float) -> bool:
        """Keeps an output until `release` moves it (by `due` at the latest) or the next `put` of its choice.

        Returns False if the output was joined with one that already waits.
        """
        key = ticket, output.choice
        if (waiting := self._waiting.get(key)) is None:
            self._waiting[key] = due, output
            return True
        due, before = waiting
        self._waiting[key] = due, before.joined(output)
        return False

    def release(self, next_chance: float = math.inf) -> None:
        """Moves all waiting outputs to the next delivery if one of them is due before `next_chance`."""
        if min((due for due, _output in self._waiting.values()), default=math.inf) < next_chance:
            self._ready += [(ticket, output) for (ticket, _choice), (_due, output) in self._waiting.items()]
            self._waiting.clear()

    def drop(self, ticket: Ticket[Output]) -> None:
        """Drops the waiting outputs of `ticket`."""
        for key in [key for key in self._waiting if key[0] is ticket]:
            del self._waiting[key]

    def deliver(self, send: Callable[[list[Delivery]], None]) -> None:
        """Sends the next delivery; if `send` raises, its outputs stay for the next call."""
        if self._ready:
            send(self._ready)
            self._ready = []


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
