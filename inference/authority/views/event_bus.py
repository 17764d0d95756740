"""Distributes numbered events to the listeners of `/events`.

A listener that reads too slowly loses its queue and gets a new snapshot instead.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

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
