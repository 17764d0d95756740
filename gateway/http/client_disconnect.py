"""Notices that a request's client left, or that the gateway stops, and cancels the task that serves it; no more."""

from __future__ import annotations

import asyncio
from types import TracebackType

from gateway.breaker.outcome import End
from headgate.shared.asgi import Receive
from headgate.shared.wire import Wire


class Presences:
    """Every request that is being served, so that a stopping gateway can end them."""

    def __init__(self) -> None:
        self._all: set[Presence] = set()

    def __len__(self) -> int:
        return len(self._all)

    def watch(self, receive: Receive, wire: Wire | None = None) -> Presence:
        """A context for the running task; its body must have been read. Without a `wire` it receives."""
        return Presence(receive, self._all, wire)

    def interrupt_all(self) -> int:
        """Ends every request honestly; returns how many there were."""
        for presence in tuple(self._all):
            presence.interrupt(End.SHUTTING_DOWN)
        return len(self._all)


class Presence:
    """While the context is open, the client's leaving cancels the task. `reason` says why a cancellation came."""

    def __init__(self, receive: Receive, everyone: set[Presence], wire: Wire | None) -> None:
        self.reason: End | None = None
        self._receive = receive
        self._wire = wire
        self._everyone = everyone
        self._task: asyncio.Task[object] | None = None
        self._listener: asyncio.Task[None] | None = None

    def __enter__(self) -> Presence:
        self._task = asyncio.current_task()
        self._everyone.add(self)
        if self._wire is not None:
            self._wire.when_left(self._left)
        else:
            self._listener = asyncio.create_task(self._listen(), name="presence")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Stops watching. Called before the last byte: the end of a response looks like the client's leaving."""
        if self._task is None:
            return
        self._task = None
        self._everyone.discard(self)
        if self._wire is not None:
            self._wire.when_left(None)
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None

    def interrupt(self, why: End) -> None:
        """Cancels the task because of `why`, once."""
        if self._task is not None and self.reason is None:
            self.reason = why
            self._task.cancel()

    def absorb(self) -> bool:
        """To be called in `except CancelledError`: whether the cancellation was ours alone and ends here."""
        task = asyncio.current_task()
        return self.reason is not None and task is not None and task.uncancel() <= 0

    def why_cancelled(self) -> End:
        """What a cancelled attempt is recorded as; the server cancelling a task means that it stops."""
        return self.reason or End.SHUTTING_DOWN

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self._left()

    def _left(self) -> None:
        self.interrupt(End.CLIENT_LEFT)
