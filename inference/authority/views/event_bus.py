"""Distributes numbered events to the listeners of `/events`, and publishes changes of models to them.

A listener that reads too slowly loses its queue and gets a new snapshot instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from headgate.shared.log import line_of
from inference.authority.clock import Alarm, Clock
from inference.authority.state import State
from inference.authority.views import model_status
from inference.protocol import ModelStatus

BEAT_SECONDS = 5.0
FIGURES_SECONDS = 1.0
"""Shortest time between two events `figures`, which only listeners that request them get."""
_MAX_WAITING = 256
_END = object()


class Bus:
    """The event bus. `snapshot` returns the whole state, for new listeners and for those that fell behind; `figures`
    the current figures of devices and models; `labels` the labels of prompts of each model.
    """

    def __init__(self) -> None:
        self.snapshot: Callable[[], dict[str, Any]] = dict
        self.figures: Callable[[], dict[str, Any]] = dict
        self.labels: Callable[[], Mapping[str, list[str]]] = dict
        self._number = 0
        self._listeners: dict[asyncio.Queue[Any], bool] = {}
        """Whether each of them gets the events `kv`."""
        self._closed = False

    def publish(self, kind: str, data: dict[str, Any]) -> None:
        """Sends an event to every listener; does not block."""
        self._number += 1
        if self._listeners:
            self._send(_frame(self._number, kind, data), self._listeners)

    def publish_labels(self, model: str, added: list[str], removed: list[str]) -> None:
        """Sends an event `kv` to the listeners that request them. It has the number of the last event."""
        if listeners := [queue for queue, kv in self._listeners.items() if kv]:
            frame = _frame(self._number, "kv", {"model": model, "added": added, "removed": removed})
            self._send(frame, listeners)

    @staticmethod
    def _send(frame: bytes, listeners: Iterable[asyncio.Queue[Any]]) -> None:
        for queue in listeners:
            if queue.qsize() >= _MAX_WAITING:
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(None)
            else:
                queue.put_nowait(frame)

    async def listen(self, *, figures: bool = False, kv: bool = False) -> AsyncIterator[bytes]:
        """SSE frames: the snapshot first, then every event, and a beat after BEAT_SECONDS without one.

        With `figures` also the changed figures, at most every FIGURES_SECONDS. They are computed only for listeners
        that request them. With `kv` also changes of the labels of prompts, and all of them in the snapshot.
        """
        clock = asyncio.get_running_loop().time
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self._listeners[queue] = kv
        known: dict[str, Any] | None = None
        try:
            yield self._snapshot(kv=kv)
            beat_at = clock() + BEAT_SECONDS
            figures_at = clock() if figures else math.inf
            while not self._closed:
                if clock() >= figures_at:
                    figures_at = clock() + FIGURES_SECONDS
                    if (found := self.figures()) != known:
                        known, beat_at = found, clock() + BEAT_SECONDS
                        yield _frame(self._number, "figures", found)
                try:
                    async with asyncio.timeout_at(min(beat_at, figures_at)):
                        frame = await queue.get()
                except TimeoutError:
                    if clock() < beat_at:
                        continue
                    frame = _frame(self._number, "beat", {})
                if frame is _END:
                    return
                beat_at = clock() + BEAT_SECONDS
                yield self._snapshot(kv=kv) if frame is None else frame
        finally:
            del self._listeners[queue]

    def _snapshot(self, *, kv: bool) -> bytes:
        labels = {"kv": self.labels()} if kv else {}
        return _frame(self._number, "snapshot", {**self.snapshot(), **labels})

    def close(self) -> None:
        """Ends the streams of all listeners."""
        self._closed = True
        for queue in self._listeners:
            queue.put_nowait(_END)


def _frame(number: int, kind: str, data: dict[str, Any]) -> bytes:
    body = json.dumps({"number": number, **data}, separators=(",", ":"))
    return f"event: {kind}\ndata: {body}\n\n".encode()


class LogPublisher(logging.Handler):
    """Publishes warnings and errors of the process as events `log`, on the thread of `loop`."""

    def __init__(self, bus: Bus, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(logging.WARNING)
        self._bus = bus
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        """Publishes one line."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._bus.publish, "log", {"line": line_of(record)})


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
        """the last published status of each model"""

    def close(self) -> None:
        """Stops publishing."""
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()

    def changed(self, seconds: float = 0.0) -> None:
        """Publishes the changes at most `seconds` from now."""
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
