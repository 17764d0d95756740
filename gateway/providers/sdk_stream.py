"""Opens, relays and closes one streamed response of a provider that an SDK describes.

The SDK gives the address, the credentials and the headers. Requests and responses are raw, because frames are relayed
or translated without the SDK's models.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Any, Protocol, TypeVar

import httpx2

from gateway.apis.openai.frames import Done, Frame
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.provider_errors import scrub, status_error
from headgate.shared.sse import SseFrame, SseSplitter
from inference.protocol import Code

log = logging.getLogger("gateway.providers.sdk_stream")

DRAIN_SECONDS = 0.05
"""How long to wait for the end of the body after the last frame; reading it makes the connection reusable."""

MAX_ANSWER_BYTES = 128 * 2**20
"""Of an answer in one piece, decompressed; 2048 embeddings of 3072 numbers as text are 130 MB."""
MAX_ERROR_BYTES = 2**20

Request = TypeVar("Request")


class EventReader(Protocol):
    """Translates the events of one stream, such as `anthropic_events.AnthropicStream`."""

    @property
    def is_complete(self) -> bool:
        """Whether the provider sent its end mark, and nothing more needs to be read."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete, even if the connection breaks now."""
        ...

    def feed(self, frame: SseFrame) -> Sequence[Frame]:
        """The frames that one server-sent event adds; raises UpstreamError."""
        ...

    def end(self) -> Sequence[Frame]:
        """The last frames of a stream whose bytes have ended; raises UpstreamError."""
        ...


def timeout_of(connect_seconds: float) -> httpx2.Timeout:
    """A timeout for connecting only; the attempt measures silence afterwards."""
    return httpx2.Timeout(None, connect=connect_seconds)


def build_request(write: Callable[[], Request]) -> Request:
    """The request to send, from `write`; raises UpstreamError.

    Another exception of `write` is a defect of the gateway: it becomes a 400, because the provider received nothing.
    """
    try:
        return write()
    except UpstreamError:
        raise
    except Exception as error:
        log.exception("a request could not be translated for a provider")
        raise UpstreamError(
            UpstreamKind.STATUS,
            f"the request could not be translated for this provider ({type(error).__name__})",
            status=400,
            code=Code.UNSUPPORTED_PARAMETER,
            type="invalid_request_error",
        ) from error


def upstream_error(error: BaseException, host: str, secrets: Sequence[str] = ()) -> UpstreamError:
    """An exception of an SDK or its HTTP client as UpstreamError."""
    if isinstance(error, UpstreamError):
        return error
    response = getattr(error, "response", None)
    if isinstance(response, httpx2.Response) and response.status_code >= 300:
        try:
            body = response.content
        except httpx2.ResponseNotRead:
            body = b""
        return status_error(response.status_code, response.headers, body, now=time.time(), secrets=secrets)
    cause = error
    while not isinstance(cause, httpx2.HTTPError) and cause.__cause__ is not None:
        cause = cause.__cause__
    kind, what = _kind_of(cause)
    detail = scrub(str(cause) or type(cause).__name__, secrets)
    return UpstreamError(kind, f"{what} {host}: {detail}")


def _kind_of(cause: BaseException) -> tuple[UpstreamKind, str]:
    match cause:
        case httpx2.ConnectTimeout():
            return UpstreamKind.CONNECT, "connect timeout to"
        case httpx2.ConnectError() | httpx2.ProxyError() | httpx2.UnsupportedProtocol():
            return UpstreamKind.CONNECT, "no connection to"
        case httpx2.TimeoutException():
            return UpstreamKind.TIMEOUT, "timeout while reading from"
        case httpx2.DecodingError() | httpx2.TooManyRedirects() | ValueError() | TypeError():
            return UpstreamKind.MALFORMED, "unreadable answer from"
    return UpstreamKind.READ, "broken connection to"


class SdkClient(Protocol):
    """What both SDKs know of their provider."""

    @property
    def base_url(self) -> httpx2.URL:
        """The address below which the paths are."""
        ...

    @property
    def default_headers(self) -> Mapping[str, Any]:
        """Version and platform; values may be markers for absent headers."""
        ...

    @property
    def auth_headers(self) -> Mapping[str, str]:
        """The credentials."""
        ...


class RawSender:
    """Sends requests to the address of an SDK client with its headers.

    The SDK's own calls add options, retries and models, which are not used here, and take as much CPU time as the rest
    of an answer in one piece.
    """

    def __init__(self, client: SdkClient, http: httpx2.AsyncClient, secrets: Sequence[str]) -> None:
        self._http = http
        self._base = f"{str(client.base_url).rstrip('/')}/"
        self._secrets = secrets
        headers = {**client.default_headers, **client.auth_headers}
        self._headers = {name.lower(): value for name, value in headers.items() if isinstance(value, str)}

    async def stream(
        self, path: str, body: bytes, connect_seconds: float, headers: Mapping[str, str]
    ) -> httpx2.Response:
        """The open response with a status below 300. `headers`: names in lower case.

        Raises UpstreamError for another status, and exceptions of httpx2.
        """
        request = self._http.build_request(
            "POST",
            self._base + path,
            content=body,
            headers={**self._headers, **headers},
            timeout=timeout_of(connect_seconds),
        )
        response = await self._http.send(request, stream=True)
        if response.status_code >= 300:
            text = await _read_body(response, MAX_ERROR_BYTES)
            raise status_error(response.status_code, response.headers, text, now=time.time(), secrets=self._secrets)
        return response

    async def whole(self, path: str, body: bytes, connect_seconds: float, headers: Mapping[str, str]) -> bytes:
        """The body of a response with a status below 300; raises as `stream`, and UpstreamError if it is too long."""
        return await _read_body(await self.stream(path, body, connect_seconds, headers), MAX_ANSWER_BYTES)


async def _read_body(response: httpx2.Response, max_bytes: int) -> bytes:
    """The whole body; the connection is closed. Raises UpstreamError beyond `max_bytes`."""
    pieces, size = [], 0
    try:
        async for piece in response.aiter_bytes():
            pieces.append(piece)
            if (size := size + len(piece)) > max_bytes:
                raise UpstreamError(
                    UpstreamKind.MALFORMED, f"the answer with status {response.status_code} exceeds {max_bytes} bytes"
                )
    finally:
        await response.aclose()
    return b"".join(pieces)


class SdkStream(AbstractAsyncContextManager[AsyncIterator[Frame]]):
    """One streamed call: entering opens it, iterating relays its frames, leaving closes the connection at once."""

    def __init__(
        self,
        send: Callable[[], Awaitable[httpx2.Response]],
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
        self._over = False

    async def __aenter__(self) -> AsyncIterator[Frame]:
        try:
            self._response = await self._send()
        except UpstreamError:
            raise
        except Exception as error:
            raise self._error(error) from error
        kind = self._response.headers.get("content-type", "")
        if not kind.lower().startswith("text/event-stream"):
            await self._response.aclose()
            raise UpstreamError(
                UpstreamKind.MALFORMED, f"expected an event stream from {self._host}, got {kind or 'no content type'}"
            )
        self._bytes = self._response.aiter_bytes()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._over and error is None and not self._response.is_closed:
            await self._drain()
        await self._response.aclose()
        with suppress(RuntimeError):  # another task may still be reading
            await self._bytes.aclose()

    def __aiter__(self) -> AsyncIterator[Frame]:
        return self

    async def __anext__(self) -> Frame:
        while not self._ready:
            if self._failure is not None:
                raise self._failure
            if self._over:
                raise StopAsyncIteration
            await self._read()
        return self._ready.popleft()

    def take_ready(self) -> list[Frame]:
        """The frames that have arrived already."""
        frames = list(self._ready)
        self._ready.clear()
        return frames

    async def _read(self) -> None:
        """Reads until frames are ready; an error is raised after the frames before it."""
        try:
            piece = await anext(self._bytes, None)
            frames = self._splitter.end() if piece is None else self._splitter.feed(piece)
            for frame in frames:
                self._ready.extend(self._reader.feed(frame))
            if piece is None or self._reader.is_complete:
                self._finish()
        except Exception as error:
            if isinstance(error, httpx2.HTTPError) and self._reader.is_finished:
                self._finish()  # the connection broke after the complete answer
            else:
                self._failure = self._error(error)

    def _finish(self) -> None:
        self._ready.extend(self._reader.end())
        assert self._ready and isinstance(self._ready[-1], Done)
        self._over = True

    async def _drain(self) -> None:
        with suppress(TimeoutError, httpx2.HTTPError, RuntimeError):  # the connection is then closed instead of reused
            async with asyncio.timeout(DRAIN_SECONDS):
                await anext(self._bytes, None)

    def _error(self, error: BaseException) -> UpstreamError:
        return upstream_error(error, self._host, self._secrets)
