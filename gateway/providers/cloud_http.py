"""Sends requests to clouds over aiohttp, which gives all bytes that have arrived as one piece.

Providers send a chunk of HTTP per token. A client that gives each chunk as a piece of its own, such as httpcore2, needs
as much CPU time for one token as aiohttp for ten that arrive together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import aiohttp
import httpx2
from aiohttp.http_exceptions import ContentEncodingError
from yarl import URL

from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.provider_errors import scrub, status_error

MAX_ANSWER_BYTES = 128 * 2**20
"""Limit of an answer without a stream, decompressed; 2048 embeddings of 3072 numbers as text are 130 MB."""
MAX_ERROR_BYTES = 2**20

DRAIN_SECONDS = 0.05
"""How long to wait for the end of a complete answer; reading it makes the connection reusable."""


def upstream_error(error: BaseException, host: str, secrets: Sequence[str] = ()) -> UpstreamError:
    """An exception of a call to a cloud as UpstreamError."""
    kind, what = _kind_of(error)
    return UpstreamError(kind, f"{what} {host}: {scrub(_text_of(error), secrets)}")


def _kind_of(error: BaseException) -> tuple[UpstreamKind, str]:
    match error:
        case aiohttp.ConnectionTimeoutError():
            return UpstreamKind.CONNECT, "connect timeout to"
        case aiohttp.ClientConnectorError() | aiohttp.ClientHttpProxyError() | ValueError():  # a bad address or header
            return UpstreamKind.CONNECT, "no connection to"
        case aiohttp.ClientPayloadError(__cause__=ContentEncodingError()):
            return UpstreamKind.MALFORMED, "unreadable answer from"
        case TimeoutError():
            return UpstreamKind.TIMEOUT, "timeout while reading from"
    return UpstreamKind.READ, "broken connection to"


def _text_of(error: BaseException) -> str:
    """The message of an error without the bytes of the answer that some errors quote."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "server disconnected"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the body is incomplete or damaged"
    if isinstance(error, aiohttp.ClientResponseError):
        return error.message.partition(":")[0]
    return str(error) or type(error).__name__


def _retrieve(closed: asyncio.Future[None]) -> None:
    """Marks the error of a closed connection as seen; otherwise asyncio logs it."""
    if not closed.cancelled():
        closed.exception()


class CloudAnswer:
    """An answer whose body is still to be read. `to_error` converts exceptions of aiohttp."""

    def __init__(self, response: aiohttp.ClientResponse, to_error: Callable[[BaseException], UpstreamError]) -> None:
        self._response = response
        self._to_error = to_error
        self._content = response.content
        self.status = response.status
        self.headers = response.headers
        connection = response.connection  # None when all of the body has arrived
        protocol = None if connection is None else connection.protocol
        self._closed = None if protocol is None else protocol.closed
        if self._closed is not None:
            self._closed.remove_done_callback(_retrieve)  # that of an earlier answer
            self._closed.add_done_callback(_retrieve)
            self._closed.add_done_callback(self._on_closed)

    def _on_closed(self, closed: asyncio.Future[None]) -> None:
        """Ends the body: after an invalid chunk aiohttp closes the connection, and the reader would wait for ever."""
        if not self._content.is_eof() and self._content.exception() is None:
            self._content.set_exception(aiohttp.ClientPayloadError())

    async def piece(self) -> bytes:
        """All bytes that have arrived since the last call, at least one; empty at the end. Raises UpstreamError."""
        try:
            return await self._content.readany()
        except Exception as error:  # without its frames: they refer to the body, which keeps the error
            raise self._to_error(error) from error.with_traceback(None)

    async def body(self, max_bytes: int) -> bytes:
        """The whole body, then the answer is closed; raises UpstreamError, also beyond `max_bytes`."""
        pieces, size = [], 0
        try:
            while piece := await self.piece():
                pieces.append(piece)
                if (size := size + len(piece)) > max_bytes:
                    raise UpstreamError(
                        UpstreamKind.MALFORMED, f"the answer with status {self.status} exceeds {max_bytes} bytes"
                    )
        finally:
            self.close()
        return b"".join(pieces)

    async def drain(self) -> None:
        """Reads what is left of a complete answer, usually its last bytes, for DRAIN_SECONDS at most."""
        if not self._content.is_eof():
            with suppress(TimeoutError, UpstreamError):  # the connection is then closed instead of reused
                async with asyncio.timeout(DRAIN_SECONDS):
                    await self.piece()

    def close(self) -> None:
        """Returns the connection to the pool if the body was read to its end, else closes it."""
        if self._closed is not None:
            self._closed.remove_done_callback(self._on_closed)
        if self._content.is_eof():
            self._response.release()
        else:
            self._response.close()


class CloudHttp:
    """Connections of the session that `open_session` creates at the first request, for one event loop.

    Redirects are not followed, so that prompts and keys go to the configured address only.
    """

    def __init__(self, open_session: Callable[[], aiohttp.ClientSession]) -> None:
        self._open_session = open_session
        self._session: aiohttp.ClientSession | None = None

    async def post(
        self, url: URL, body: bytes, headers: Mapping[str, str], connect_seconds: float
    ) -> aiohttp.ClientResponse:
        """The response with any status; its body is still to be read. Raises exceptions of aiohttp."""
        if self._session is None:  # a session belongs to the running loop
            self._session = self._open_session()
        timeout = aiohttp.ClientTimeout(connect=connect_seconds)
        return await self._session.post(url, data=body, headers=headers, allow_redirects=False, timeout=timeout)

    async def aclose(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()


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


class CloudSender:
    """Sends requests to the address that an SDK knows, with its headers, over `http`.

    The SDK's own calls take as much CPU time as all else for an answer without a stream: they add options, retries and
    pydantic models of the answers, which are not used here.
    """

    def __init__(self, client: SdkClient, http: CloudHttp, secrets: Sequence[str]) -> None:
        self._http = http
        self._base = f"{str(client.base_url).rstrip('/')}/"
        self._host = client.base_url.host
        self._urls: dict[str, URL] = {}
        self._secrets = secrets
        headers = {**client.default_headers, **client.auth_headers}
        self._headers = {name.lower(): value for name, value in headers.items() if isinstance(value, str)}

    async def open(self, path: str, body: bytes, connect_seconds: float, headers: Mapping[str, str]) -> CloudAnswer:
        """The open answer with a status below 300; raises UpstreamError. `headers`: names in lower case."""
        try:
            if (url := self._urls.get(path)) is None:
                url = self._urls[path] = URL(self._base + path)
            response = await self._http.post(url, body, {**self._headers, **headers}, connect_seconds)
        except Exception as error:
            raise self._to_error(error) from error
        answer = CloudAnswer(response, self._to_error)
        if answer.status >= 300:
            text = await answer.body(MAX_ERROR_BYTES)
            raise status_error(answer.status, answer.headers, text, now=time.time(), secrets=self._secrets)
        return answer

    async def whole(self, path: str, body: bytes, connect_seconds: float, headers: Mapping[str, str]) -> bytes:
        """The body of an answer with a status below 300; raises UpstreamError."""
        return await (await self.open(path, body, connect_seconds, headers)).body(MAX_ANSWER_BYTES)

    def _to_error(self, error: BaseException) -> UpstreamError:
        return upstream_error(error, self._host, self._secrets)

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._http.aclose()
