"""Opens, relays and closes one streamed answer of a cloud."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol, TypeVar

from gateway.apis.openai.frames import Done, Frame
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.cloud_http import CloudAnswer
from gateway.providers.provider_errors import scrub
from headgate.shared.sse import SseFrame, SseSplitter
from inference.protocol import Code

log = logging.getLogger("gateway.providers.cloud_stream")

Request = TypeVar("Request")


class EventReader(Protocol):
    """Translates the events of one stream, such as `anthropic_events.AnthropicStream`."""

    @property
    def is_complete(self) -> bool:
        """Whether the provider sent its end mark, and nothing more needs to be read."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether the finish reasons have arrived: the answer counts as whole even if the connection breaks now."""
        ...

    def feed(self, frame: SseFrame) -> Sequence[Frame]:
        """The frames that one server-sent event adds; raises UpstreamError."""
        ...

    def end(self) -> Sequence[Frame]:
        """The last frames of a stream whose bytes have ended; raises UpstreamError."""
        ...


def build_request(write: Callable[[], Request]) -> Request:
    """The request to send, from `write`; raises UpstreamError.

    Another exception of `write` is a defect of the gateway: it becomes a 400, because the provider received nothing.
    """
    try:
        return write()
    except UpstreamError:
        raise
    except Exception as error:
        log.exception("internal error: a request could not be translated for a provider")
        raise UpstreamError(
            UpstreamKind.STATUS,
            f"the request could not be translated for this provider ({type(error).__name__})",
            status=400,
            code=Code.UNSUPPORTED_PARAMETER,
            type="invalid_request_error",
        ) from error


class CloudStream(AbstractAsyncContextManager[AsyncIterator[Frame]]):
    """One streamed call: entering opens it, iterating relays its frames, leaving closes the connection at once.

    After a complete answer the connection is returned to the pool instead.
    """

    def __init__(
        self,
        send: Callable[[], Awaitable[CloudAnswer]],
        reader: EventReader,
        host: str,
        secrets: Sequence[str] = (),
    ) -> None:
        self._send = send
        self._reader = reader
        self._host = host
        self._secrets = secrets
        self._splitter = SseSplitter()
        self._ready: deque[Frame] = deque()
        self._failure: UpstreamError | None = None
        self._has_failed = False
        self._over = False

    async def __aenter__(self) -> AsyncIterator[Frame]:
        self._answer = await self._send()
        kind = self._answer.headers.get("content-type", "")
        if not kind.lower().startswith("text/event-stream"):
            self._answer.close()
            raise UpstreamError(
                UpstreamKind.MALFORMED, f"expected an event stream from {self._host}, got {kind or 'no content type'}"
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._over and error is None:
                await self._answer.drain()
        finally:
            self._answer.close()

    def __aiter__(self) -> AsyncIterator[Frame]:
        return self

    async def __anext__(self) -> Frame:
        while not self._ready:
            failure, self._failure = self._failure, None
            if failure is not None:
                self._has_failed = True
                raise failure
            if self._over or self._has_failed:
                raise StopAsyncIteration
            await self._read()
        return self._ready.popleft()

    def take_ready(self) -> list[Frame]:
        """The frames that have arrived already."""
        frames = list(self._ready)
        self._ready.clear()
        return frames

    async def _read(self) -> None:
        """Reads once; the error of a malformed frame is raised after the frames before it."""
        try:
            piece = await self._answer.piece()
        except UpstreamError as error:
            if not self._reader.is_finished:
                self._failure = error
                return
            piece = b""  # the connection broke after the complete answer
        try:
            for frame in self._splitter.feed(piece) if piece else self._splitter.end():
                self._ready.extend(self._reader.feed(frame))
            if not piece or self._reader.is_complete:
                self._finish()
        except UpstreamError as error:
            self._failure = error
        except Exception as error:
            self._failure = UpstreamError(
                UpstreamKind.MALFORMED, f"unreadable answer from {self._host}: {scrub(str(error), self._secrets)}"
            )

    def _finish(self) -> None:
        self._ready.extend(self._reader.end())
        assert self._ready and isinstance(self._ready[-1], Done)
        self._over = True
