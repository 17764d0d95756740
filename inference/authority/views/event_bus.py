"""Distributes numbered events to the listeners of `/events`, and publishes changes of models to them.

A listener that reads too slowly loses its queue and gets a new snapshot instead.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from inference.authority.clock import Alarm, Clock
from inference.authority.state import State
from inference.authority.views import model_status
from inference.protocol import ModelStatus

BEAT_SECONDS = 5.0
_MOST_WAITING = 256
_END = object()


class Bus:
    """The event bus. `snapshot` returns the whole state, for new listeners and for those that fell behind."""

    def __init__(self) -> None:
        self.snapshot: Callable[[], dict[str, Any]] = dict
        self._number = 0
        self._listeners: set[asyncio.Queue[Any]] = set()
        self._closed = False

    def publish(self, kind: str, data: dict[str, Any]) -> None:
        """Sends an event to every listener; does not block."""
        self._number += 1
        frame = _frame(self._number, kind, data)
        for queue in self._listeners:
            if queue.qsize() >= _MOST_WAITING:
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(None)
            else:
                queue.put_nowait(frame)

    async def listen(self) -> AsyncIterator[bytes]:
        """SSE frames: the snapshot first, then every event, and a beat after BEAT_SECONDS without one."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            yield _frame(self._number, "snapshot", self.snapshot())
            while not self._closed:
                try:
                    frame = await asyncio.wait_for(queue.get(), BEAT_SECONDS)
                except TimeoutError:
                    yield _frame(self._number, "beat", {})
                    continue
                if frame is _END:
                    return
                yield _frame(self._number, "snapshot", self.snapshot()) if frame is None else frame
        finally:
            self._listeners.discard(queue)

    def close(self) -> None:
        """Ends the streams of all listeners."""
        self._closed = True
        for queue in self._listeners:
            queue.put_nowait(_END)


def _frame(number: int, kind: str, data: dict[str, Any]) -> bytes:
    body = json.dumps({"number": number, **data}, separators=(",", ":"))
    return f"event: {kind}\ndata: {body}\n\n".encode()


class Notifier:
    """Publishes changes of models; changes at the same time are published together. `state` returns the current one."""

    def __init__(self, bus: Bus, clock: Clock, state: Callable[[], State]) -> None:
        self._bus = bus
        self._clock = clock
        self._current = state
        self._alarm: Alarm | None = None
        self._due_at = 0.0
        self._closed = False
        self._known: dict[str, ModelStatus] = {}
        """the status of each model that listeners have"""

    def close(self) -> None:
        """Stops publishing."""
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()

    def changed(self, seconds: float = 0.0) -> None:
        """Publishes changes within `seconds`."""
        due = self._clock.now() + seconds
        if self._alarm is not None:
            if self._due_at <= due:
                return
            self._alarm.cancel()
        if not self._closed:
            self._due_at = due
            self._alarm = self._clock.call_at(due, self._publish)

    def _publish(self) -> None:
        self._alarm = None
        state, now = self._current(), self._clock.now()
        found = model_status.statuses(state, now)
        for status in found:
            if model_status.differs(status, self._known.get(status.id)):
                self._known[status.id] = status
                self._bus.publish("model", {"model": status.to_json()})
        for name in self._known.keys() - {status.id for status in found}:
            del self._known[name]
            self._bus.publish("removed", {"id": name})
