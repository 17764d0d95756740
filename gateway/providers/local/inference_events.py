"""Subscribes to `/events` of the inference service and passes the events to the `InferenceView`.

A stream that ends, fails, is malformed or becomes silent is opened again after a pause. The view is also refreshed by
polling, so events only make it newer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import orjson

from gateway.errors import UpstreamError
from gateway.providers.local.inference_snapshot import InferenceView
from headgate.shared.sse import SseSplitter

log = logging.getLogger("gateway.providers.local.inference_events")

SILENCE_SECONDS = 15.0
"""Three intervals of the service's `beat` events."""
LEAST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 1.0, 30.0
MAX_FRAME_BYTES = 4 * 2**20
"""Much more than the snapshot of a thousand models."""


class Source(Protocol):
    """Where events come from."""

    def events(self, silence_seconds: float) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The bytes of the event stream; raises UpstreamError if it cannot be opened or is silent for that long."""
        ...


class Events:
    """The subscription of one gateway. `source` is called for each stream, because a reload may change it."""

    def __init__(self, source: Callable[[], Source], view: InferenceView) -> None:
        self._source = source
        self._view = view
        self._retry = asyncio.Event()
        self._last_reason = ""
        self.is_open = False
        """Whether a stream is open and began with a snapshot."""

    def retry(self) -> None:
        """Ends the pause before the next try: the service is reachable."""
        self._retry.set()

    async def run(self) -> None:
        """Reads events until cancelled."""
        pause = LEAST_PAUSE_SECONDS
        while True:
            why = await self._listen()
            self._retry.clear()
            pause = LEAST_PAUSE_SECONDS if self.is_open else pause
            if self.is_open:
                self.is_open = False
                self._view.poll_soon()
            self._log_reason(why)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._retry.wait()
            pause = min(2 * pause, MOST_PAUSE_SECONDS)

    async def _listen(self) -> str:
        """Reads one stream to its end; returns the reason of its end."""
        source = self._source()
        try:
            async with source.events(SILENCE_SECONDS) as pieces:
                stream = _Stream(self._view)
                async for piece in pieces:
                    if self._source() is not source:
                        return "the configured service has changed"
                    stream.feed(piece)
                    self.is_open = self.is_open or stream.has_begun
        except UpstreamError as error:
            return str(error)
        except ValueError as error:
            return f"invalid event: {error}"
        except Exception as error:
            log.exception("events of the inference service could not be processed")
            return repr(error)
        return "the stream ended"

    def _log_reason(self, why: str) -> None:
        """Logs once why there are no events."""
        if why != self._last_reason:
            log.info("no events of the inference service: %s; polling it every few seconds", why)
        self._last_reason = why


class _Stream:
    """One stream: a snapshot, then numbered changes. Raises ValueError for a malformed stream."""

    def __init__(self, view: InferenceView) -> None:
        self._view = view
        self._splitter = SseSplitter(MAX_FRAME_BYTES)
        self._number = 0
        self.has_begun = False

    def feed(self, piece: bytes) -> None:
        """Processes the next bytes."""
        for frame in self._splitter.feed(piece):
            if frame.data is not None and frame.event is not None:
                data = orjson.loads(frame.data)
                if not isinstance(data, dict):
                    raise ValueError("an event that is not an object")
                self._take(frame.event.decode("ascii", "replace"), data)

    def _take(self, kind: str, data: dict[str, Any]) -> None:
        if not self.has_begun and kind != "snapshot":
            raise ValueError("the stream does not begin with a snapshot")
        number = data.get("number")
        if kind not in ("snapshot", "beat") and number != self._number + 1:
            self._view.poll_soon()  # some were lost
        if kind != "beat" and isinstance(number, int):
            self._number = number
        try:
            self._view.apply(kind, data)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the event {kind!r} lacks {error}") from error
        self.has_begun = True
