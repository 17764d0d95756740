"""An HTTP transport for httpx2 clients that uses aiohttp: all bytes that have arrived are one piece.

httpcore2 gives each chunk of HTTP its own piece. Providers send a chunk per token, and each piece costs as much as ten
tokens that arrive together. The transport of the SDKs for aiohttp reports a broken connection as one that could not be
opened, and allows 100 connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import aiohttp
import httpx2

_ERRORS: tuple[tuple[type[BaseException], type[httpx2.TransportError]], ...] = (
    (aiohttp.ConnectionTimeoutError, httpx2.ConnectTimeout),
    (aiohttp.ServerTimeoutError, httpx2.ReadTimeout),
    (aiohttp.ClientConnectorError, httpx2.ConnectError),
    (aiohttp.ServerDisconnectedError, httpx2.RemoteProtocolError),
    (aiohttp.ClientPayloadError, httpx2.RemoteProtocolError),
    (aiohttp.ClientResponseError, httpx2.RemoteProtocolError),
    (aiohttp.InvalidURL, httpx2.UnsupportedProtocol),
    (aiohttp.ClientError, httpx2.ReadError),
    (OSError, httpx2.ReadError),
)
"""The first class that fits decides."""


@contextmanager
def _as_httpx_errors(request: httpx2.Request) -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientError, OSError) as error:
        kind = next(kind for found, kind in _ERRORS if isinstance(error, found))
        raise kind(_text_of(error), request=request) from error


def _text_of(error: BaseException) -> str:
    """The message of an error without the bytes of the answer that some quote."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "server disconnected"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the body is incomplete or has invalid chunks"
    if isinstance(error, aiohttp.ClientResponseError):
        return error.message.partition(":")[0]
    return str(error) or type(error).__name__


def _retrieve(closed: asyncio.Future[None]) -> None:
    """Marks the error of a closed connection as seen; asyncio logs others."""
    if not closed.cancelled():
        closed.exception()


class _Body(httpx2.AsyncByteStream):
    def __init__(self, request: httpx2.Request, response: aiohttp.ClientResponse) -> None:
        self._request = request
        self._response = response
        connection = response.connection  # None when all of the body has arrived
        protocol = None if connection is None else connection.protocol
        self._closed = None if protocol is None else protocol.closed
        if self._closed is not None:
            self._closed.remove_done_callback(_retrieve)  # that of an earlier response
            self._closed.add_done_callback(_retrieve)
            self._closed.add_done_callback(self._on_closed)

    def _on_closed(self, closed: asyncio.Future[None]) -> None:
        """Ends the body: after an invalid chunk aiohttp closes the connection, and the reader would wait for ever."""
        content = self._response.content
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError())

    async def __aiter__(self) -> AsyncIterator[bytes]:
        content = self._response.content
        with _as_httpx_errors(self._request):
            while piece := await content.readany():
                yield piece

    async def aclose(self) -> None:
        """Returns the connection if the body was read to its end, else closes it."""
        if self._closed is not None:
            self._closed.remove_done_callback(self._on_closed)
        if self._response.content.is_eof():
            self._response.release()
        else:
            self._response.close()


class AiohttpTransport(httpx2.AsyncBaseTransport):
    """Connections of the session that `open_session` creates at the first request, for one event loop.

    Redirects, cookies and proxies are not handled.
    """

    def __init__(self, open_session: Callable[[], aiohttp.ClientSession]) -> None:
        self._open_session = open_session
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Sends a request whose body is in memory."""
        timeout = request.extensions.get("timeout", {})
        if self._session is None:  # a session belongs to the running loop
            self._session = self._open_session()
        with _as_httpx_errors(request):
            response = await self._session.request(
                request.method,
                str(request.url),
                headers=request.headers.multi_items(),
                data=request.content or None,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(connect=timeout.get("connect"), sock_read=timeout.get("read")),
            )
        return httpx2.Response(
            response.status, headers=response.raw_headers, stream=_Body(request, response), request=request
        )

    async def aclose(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()
