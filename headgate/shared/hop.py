"""HTTP/1.1 client for requests between Headgate's own services and workers.

It calls a function for each piece of a response. An awaited reader would cost a task wake-up and an iteration of the
event loop per token.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import httptools

MAX_HEAD_BYTES = 65536

Connector = Callable[[Callable[[], asyncio.Protocol]], Awaitable[Any]]
"""Opens a connection for a protocol. Raises OSError."""


class BrokenError(Exception):
    """The connection ended before the response was complete, or the response is not HTTP."""


def unix(path: str) -> Connector:
    """Connects to a Unix socket."""
    return lambda protocol: asyncio.get_running_loop().create_unix_connection(protocol, path)


def tcp(host: str, port: int, *, tls: ssl.SSLContext | None = None, server_name: str | None = None) -> Connector:
    """Connects to a port, with TLS if `tls` is given. The certificate must name `server_name`, by default `host`."""
    return lambda protocol: asyncio.get_running_loop().create_connection(
        protocol, host, port, ssl=tls, server_hostname=server_name if tls else None
    )


class Hop:
    """A client for one server, with a pool of connections.

    A connection is reused within `idle_seconds` after its last response (0: not at all), and closed before twice
    `idle_seconds` have passed.
    """

    def __init__(self, connector: Connector, host: str, idle_seconds: float = 0.0) -> None:
        """`host` is the value of the Host header."""
        self._connector = connector
        self._host = host
        self._end = ("", "") if idle_seconds else ("connection: close", "", "")
        """The last lines of each request head."""
        self._idle_seconds = idle_seconds
        self._idle: list[_Connection] = []
        """The most recently used connection is last, and is used first."""
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str], connect_seconds: float | None = None
    ) -> Answer:
        """Sends a POST and returns when status and headers have arrived.

        Raises OSError when no connection opens, its subclass TimeoutError after `connect_seconds` (None: never),
        BrokenError when the connection ends before the head of the response or the response is not HTTP, and ValueError
        for a header with a line break.
        """
        return await self._request("POST", path, body, headers, connect_seconds)

    async def get(self, path: str, headers: Mapping[str, str], connect_seconds: float | None = None) -> Answer:
        """Sends a GET, see `post`."""
        return await self._request("GET", path, b"", headers, connect_seconds)

    async def _request(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], connect_seconds: float | None
    ) -> Answer:
        begin = f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-length: {len(body)}"
        head = "\r\n".join((begin, *map(": ".join, headers.items()), *self._end)).encode("latin-1")
        breaks = 2 + len(headers) + len(self._end)
        if head.count(b"\n") != breaks or head.count(b"\r") != breaks:
            raise ValueError("a request header contains a line break")
        connection = self._take_idle() or await self._connect(connect_seconds)
        try:
            return await connection.send(head + body)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Closes idle connections now, and the others when their responses end."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh(self._idle_seconds):
                return connection
            connection.close()
        return None

    async def _connect(self, seconds: float | None) -> _Connection:
        connection = _Connection(self._keep if self._idle_seconds else None)
        async with asyncio.timeout(seconds):
            await self._connector(lambda: connection)
        return connection

    def _keep(self, connection: _Connection) -> None:
        self._idle.append(connection)
        if self._closed:
            self.close()
        elif self._sweep is None:
            self._sweep_later()

    def _sweep_later(self) -> None:
        self._sweep = asyncio.get_running_loop().call_later(self._idle_seconds, self._close_stale)

    def _close_stale(self) -> None:
        self._sweep = None
        kept: list[_Connection] = []
        for connection in self._idle:
            if connection.is_fresh(self._idle_seconds):
                kept.append(connection)
            else:
                connection.close()
        self._idle = kept
        if kept:
            self._sweep_later()


class Answer:
    """A response whose head has arrived. The caller must call `close`."""

    def __init__(self, connection: _Connection, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        self.headers = headers
        """Names are in lower case. Of several headers with one name the last one counts."""
        self._connection = connection

    def listen(self, on_piece: Callable[[bytes], None], on_end: Callable[[BrokenError | None], None]) -> None:
        """Calls `on_piece` for each piece of the body, then `on_end` once, with the error if there was one.

        The functions must not raise.
        """
        self._connection.listen(on_piece, on_end)

    def pause(self) -> None:
        """Stops reading until `resume`. Bytes that were read before are still delivered."""
        self._connection.set_reading(False)

    def resume(self) -> None:
        """Continues reading after `pause`."""
        self._connection.set_reading(True)

    async def whole(self, max_bytes: int | None = None) -> bytes:
        """The body; with `max_bytes` reading may end after this many bytes. Replaces `listen`. Raises BrokenError."""
        done = asyncio.get_running_loop().create_future()
        pieces: list[bytes] = []

        def on_piece(piece: bytes) -> None:
            pieces.append(piece)
            if max_bytes is not None and not done.done() and sum(map(len, pieces)) >= max_bytes:
                done.set_result(None)

        def on_end(error: BrokenError | None) -> None:
            if not done.done() and error is None:
                done.set_result(None)
            elif not done.done():
                done.set_exception(error)  # type: ignore[arg-type]

        self.listen(on_piece, on_end)
        await done
        return b"".join(pieces)

    async def pieces(self, silence_seconds: float) -> AsyncGenerator[bytes, None]:
        """The pieces of the body. Reading pauses while the caller handles a piece. Replaces `listen`.

        Raises BrokenError, and TimeoutError after `silence_seconds` without a piece.
        """
        arrived: asyncio.Queue[bytes | BrokenError | None] = asyncio.Queue()

        def on_piece(piece: bytes) -> None:
            self.pause()
            arrived.put_nowait(piece)

        self.listen(on_piece, arrived.put_nowait)
        while True:
            async with asyncio.timeout(silence_seconds):
                found = await arrived.get()
            if found is None:
                return
            if isinstance(found, BrokenError):
                raise found
            yield found
            self.resume()

    def close(self, linger_seconds: float = 0.0) -> None:
        """Returns the connection to the pool after a complete response, else closes it.

        With `linger_seconds` an incomplete response may be completed in the background within that time.
        """
        self._connection.release(linger_seconds)


class _Connection(asyncio.Protocol):
    """One connection with one request at a time. Its HTTP parser calls the `on_` methods."""

    def __init__(self, keep: Callable[[_Connection], None] | None) -> None:
        self._idle_since = 0.0
        self._keep = keep
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._error: BrokenError | None = None
        self._is_reading = True
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append
        """The parser calls it with each piece of the body. The pieces wait for `_deliver`."""
        self._parser = httptools.HttpResponseParser(self)
        self._renew()

    def _renew(self) -> None:
        self._head: asyncio.Future[Answer] | None = None
        self._headers: dict[str, str] = {}
        self._pieces.clear()
        self._on_piece: Callable[[bytes], None] | None = None
        self._on_end: Callable[[BrokenError | None], None] | None = None
        self._head_bytes = 0
        self._complete = False
        self._is_kept_alive = False

    # --- called by Answer and Hop --------------------------------------------------------------------------------
    @property
    def is_closed(self) -> bool:
        """Whether no request can be sent any more."""
        return self._error is not None or self._transport is None or self._transport.is_closing()

    def is_fresh(self, idle_seconds: float) -> bool:
        """Whether the connection is open and was used within `idle_seconds`."""
        return not self.is_closed and self._loop.time() - self._idle_since <= idle_seconds

    def send(self, request: bytes) -> asyncio.Future[Answer]:
        """Sends a request. The future gets the response or BrokenError. After cancelling it the caller must `close`.

        Raises BrokenError when the connection has ended.
        """
        assert self._transport is not None
        if self._error is not None:
            raise self._error
        self._head = self._loop.create_future()
        self._transport.write(request)
        return self._head

    def listen(self, on_piece: Callable[[bytes], None], on_end: Callable[[BrokenError | None], None]) -> None:
        """See Answer."""
        self._on_piece, self._on_end = on_piece, on_end
        self._deliver()

    def set_reading(self, is_reading: bool) -> None:
        """Pauses or resumes reading from the socket."""
        if self._transport is not None and is_reading is not self._is_reading and not self._transport.is_closing():
            self._is_reading = is_reading
            if is_reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def release(self, linger_seconds: float = 0.0) -> None:
        """Ends the use of the current response, see Answer.close."""
        self._on_piece = self._on_end = None
        if linger_seconds and self._keep is not None and not self._complete and not self.is_closed:
            timer = self._loop.call_later(linger_seconds, self.close)

            def on_end(_error: BrokenError | None) -> None:
                timer.cancel()
                self.release()

            self.set_reading(True)
            self.listen(lambda _: None, on_end)
            return
        if self._complete and self._is_kept_alive and self._keep is not None and not self.is_closed:
            self._renew()
            self.set_reading(True)
            self._idle_since = self._loop.time()
            self._keep(self)
        else:
            self.close()

    def close(self) -> None:
        """Aborts the connection."""
        self._on_piece = self._on_end = None
        if self._transport is not None:
            self._transport.abort()

    # --- called by the event loop --------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # a stream transport
        """Keeps the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parses bytes of the response."""
        if self._head is None:
            self._fail("the server sent bytes without a request")
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the response is not HTTP ({error})")
            return
        if not self._head.done():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fail(f"the head of the response is longer than {MAX_HEAD_BYTES} bytes")
            return
        self._deliver()

    def connection_lost(self, error: Exception | None) -> None:
        """Ends a body without a length; otherwise the response, if it is incomplete, has failed."""
        has_length = "content-length" in self._headers or "transfer-encoding" in self._headers
        if error is None and self._head is not None and self._head.done() and not has_length:
            self._complete = True
        self._fail("the connection was closed", error)

    def _fail(self, message: str, cause: Exception | None = None) -> None:
        if self._error is None:
            self._error = BrokenError(message)
            self._error.__cause__ = cause
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()
        if self._head is not None and not self._head.done():
            self._head.set_exception(self._error)
        self._deliver()

    def _deliver(self) -> None:
        if self._on_piece is None:
            return
        if self._pieces:
            piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            self._on_piece(piece)
        if (self._complete or self._error is not None) and self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(None if self._complete else self._error)

    # --- called by the parser ------------------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        """Refuses a second response to one request. Interim responses (1xx) are allowed."""
        if self._complete:
            raise BrokenError("a response without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keeps a header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Resolves the future of `send`. Ignores interim responses (1xx)."""
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = {}
        elif self._head is not None and not self._head.done():
            self._head.set_result(Answer(self, status, self._headers))

    def on_message_complete(self) -> None:
        """Marks the response as complete."""
        if self._parser.get_status_code() >= 200:
            self._complete = True
            self._is_kept_alive = self._parser.should_keep_alive()
