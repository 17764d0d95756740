"""Cancels the task of a request when its client disconnects or the gateway stops."""

from __future__ import annotations

import asyncio
from types import TracebackType

from gateway.breaker.outcome import End
from headgate.shared.asgi import Receive, wait_for_disconnect
from headgate.shared.wire import Wire


class OpenRequests:
    """All requests that are being served."""

    def __init__(self) -> None:
        self._all: set[DisconnectWatch] = set()

    def __len__(self) -> int:
        return len(self._all)

    def watch(self, receive: Receive, wire: Wire | None = None) -> DisconnectWatch:
        """A context for the running task, after the body was read. Without a `wire` it calls `receive`."""
        return DisconnectWatch(receive, self._all, wire)

    def interrupt_all(self) -> int:
        """Cancels every request; returns how many there were."""
        for watch in tuple(self._all):
            watch.interrupt(End.SHUTTING_DOWN)
        return len(self._all)


class DisconnectWatch:
    """While the context is open, a disconnect cancels the task. `reason` is why it was cancelled."""

    def __init__(self, receive: Receive, open_requests: set[DisconnectWatch], wire: Wire | None) -> None:
        self.reason: End | None = None
        self._receive = receive
        self._wire = wire
        self._presences = open_requests
        self._task: asyncio.Task[object] | None = None
        self._listener: asyncio.Task[None] | None = None

    def __enter__(self) -> DisconnectWatch:
        self._task = asyncio.current_task()
        self._presences.add(self)
        if self._wire is not None:
            self._wire.on_disconnect(self._left)
        else:
            self._listener = asyncio.create_task(self._listen(), name="disconnect-watch")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Stops watching. Called before the last byte, because the end of a response looks like a disconnect."""
        if self._task is None:
            return
        self._task = None
        self._presences.discard(self)
        if self._wire is not None:
            self._wire.on_disconnect(None)
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None

    def interrupt(self, why: End) -> None:
        """Cancels the task with the reason `why`, once."""
        if self._task is not None and self.reason is None:
            self.reason = why
            self._task.cancel()

    def absorb(self) -> bool:
        """For `except CancelledError`: whether `interrupt` was the only cancellation, which then ends here."""
        task = asyncio.current_task()
        return self.reason is not None and task is not None and task.uncancel() <= 0

    def cancel_reason(self) -> End:
        """The recorded end of a cancelled attempt; a cancellation by the server means that it stops."""
        return self.reason or End.SHUTTING_DOWN

    async def _listen(self) -> None:
        await wait_for_disconnect(self._receive)
        self._left()

    def _left(self) -> None:
        self.interrupt(End.CLIENT_LEFT)
