"""Listens to what the inference service tells by itself and hands it to the view; concludes nothing from silence.

A stream that ends, is refused, breaks the rules or falls silent is opened again after a pause. The view is polled all
the same, so that events only make it newer.
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
"""Three of the service's beats."""
LEAST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 1.0, 30.0
MAX_FRAME_BYTES = 4 * 2**20
"""Far more than the snapshot of a thousand models."""


class Source(Protocol):
    """Where events come from."""

    def events(self, silence_seconds: float) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The bytes of the event stream; raises UpstreamError when there is none, or nothing for so long."""
        ...


class Events:
    """The subscription of one gateway. `source` is asked anew for each stream, because a reload may change it."""

    def __init__(self, source: Callable[[], Source], view: InferenceView) -> None:
        self._source = source
        self._view = view
        self._retry = asyncio.Event()
        self._told = ""
        self.is_open = False
        """Whether a stream is open and began with a snapshot."""

    def retry(self) -> None:
        """The service is there: whoever waits for another try does not."""
        self._retry.set()

    async def run(self) -> None:
        """Listens until cancelled, whatever happens."""
        pause = LEAST_PAUSE_SECONDS
        while True:
            why = await self._listen()
            self._retry.clear()
            pause = LEAST_PAUSE_SECONDS if self.is_open else pause
            if self.is_open:
                self.is_open = False
                self._view.look()
            self._tell(why)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._retry.wait()
            pause = min(2 * pause, MOST_PAUSE_SECONDS)

    async def _listen(self) -> str:
        """Takes over one stream to its end; says why it ended."""
        source = self._source()
        try:
            async with source.events(SILENCE_SECONDS) as pieces:
                stream = _Stream(self._view)
                async for piece in pieces:
                    if self._source() is not source:
                        return "another service is asked now"
                    stream.feed(piece)
                    self.is_open = self.is_open or stream.has_begun
        except UpstreamError as error:
            return str(error)
        except ValueError as error:
            return f"what it tells makes no sense: {error}"
        except Exception as error:
            log.exception("events of the inference service could not be taken over")
            return repr(error)
        return "the stream ended"

    def _tell(self, why: str) -> None:
        """Says once why there are no events."""
        if why != self._told:
            log.info("events of the inference service are not heard: %s; it is asked every few seconds as ever", why)
        self._told = why


class _Stream:
    """One stream: a snapshot first, then numbered changes. Raises ValueError for one that begins otherwise."""

    def __init__(self, view: InferenceView) -> None:
        self._view = view
        self._splitter = SseSplitter(MAX_FRAME_BYTES)
        self._number = 0
        self.has_begun = False

    def feed(self, piece: bytes) -> None:
        """The next bytes."""
        for frame in self._splitter.feed(piece):
            if frame.data is not None and frame.event is not None:
                data = orjson.loads(frame.data)
                if not isinstance(data, dict):
                    raise ValueError("an event that is no object")
                self._take(frame.event.decode("ascii", "replace"), data)

    def _take(self, kind: str, data: dict[str, Any]) -> None:
        if not self.has_begun and kind != "snapshot":
            raise ValueError("it does not begin with a snapshot")
        number = data.get("number")
        if kind not in ("snapshot", "beat") and number != self._number + 1:
            self._view.look()  # some were lost
        if kind != "beat" and isinstance(number, int):
            self._number = number
        try:
            self._view.hear(kind, data)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{kind} without {error}") from error
        self.has_begun = True
