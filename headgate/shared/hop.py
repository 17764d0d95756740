"""Asks another service of Headgate and hands on the pieces of its answer as they arrive; judges and retries nothing.

For streams of tokens: a piece is a function call, where a reader that is awaited costs a wake-up of its task and a turn
of the loop. Answers that come whole are better asked for with a real client.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httptools

MAX_HEAD_BYTES = 65536

Connector = Callable[[Callable[[], asyncio.Protocol]], Awaitable[Any]]
"""Opens a connection for a protocol; raises OSError."""


class BrokenError(Exception):
    """The connection ended before the answer did, or what came over it is not HTTP."""


def unix(path: str) -> Connector:
    """Connects to a Unix socket."""
    return lambda protocol: asyncio.get_running_loop().create_unix_connection(protocol, path)


def tcp(host: str, port: int, *, tls: bool = False) -> Connector:
    """Connects to a port."""
    trust = ssl.create_default_context() if tls else None  # once: reading the authorities takes milliseconds
    return lambda protocol: asyncio.get_running_loop().create_connection(protocol, host, port, ssl=trust)


class Hop:
    """Where to ask. A connection whose answer ended is used again within `idle_seconds`; 0 uses each once.

    A connection that stays idle longer is closed before twice `idle_seconds` have passed.
    """

    def __init__(self, connector: Connector, host: str, idle_seconds: float = 0.0) -> None:
        """`host` is what the requests' Host header says."""
        self._connector = connector
        self._host = host
        self._end = ("", "") if idle_seconds else ("connection: close", "", "")
        """The last lines of every head."""
        self._idle_seconds = idle_seconds
        self._idle: list[_Connection] = []
        """The newest last, which is used first."""
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str], connect_seconds: float | None = None
    ) -> Answer:
        """The answer once its status and headers are here. Raises OSError (TimeoutError is one) when there is no
        connection, then BrokenError.
        """
        begin = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-length: {len(body)}"
        head = "\r\n".join((begin, *map(": ".join, headers.items()), *self._end)).encode("latin-1")
        breaks = 2 + len(headers) + len(self._end)
        if head.count(b"\n") != breaks or head.count(b"\r") != breaks:
            raise ValueError("a header of a request holds a line break")
        connection = self._used_before() or await self._connected(connect_seconds)
        try:
            return await connection.ask(head + body)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Closes the connections that nobody uses now, and the others when their answers end."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _used_before(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh(self._idle_seconds):
                return connection
            connection.close()
        return None

    async def _connected(self, seconds: float | None) -> _Connection:
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
    """A response whose head is here. Whoever has it ends with `close`."""

    def __init__(self, connection: _Connection, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        self.headers = headers
        """By lower-case name; the last of several."""
        self._connection = connection

    def listen(self, on_piece: Callable[[bytes], None], on_end: Callable[[BrokenError | None], None]) -> None:
        """Calls `on_piece` for everything that has arrived and will, then `on_end` once, with what went wrong if
        something did. Neither may raise.
        """
        self._connection.listen(on_piece, on_end)

    def pause(self) -> None:
        """Lets nothing more arrive until `resume`, but for what is here already."""
        self._connection.flow(False)

    def resume(self) -> None:
        """Undoes `pause`."""
        self._connection.flow(True)

    async def whole(self, most_bytes: int | None = None) -> bytes:
        """All of the body, or its beginning of at least `most_bytes`; instead of `listen`. Raises BrokenError."""
        done = asyncio.get_running_loop().create_future()
        pieces: list[bytes] = []

        def on_piece(piece: bytes) -> None:
            pieces.append(piece)
            if most_bytes is not None and not done.done() and sum(map(len, pieces)) >= most_bytes:
                done.set_result(None)

        def on_end(error: BrokenError | None) -> None:
            if not done.done() and error is None:
                done.set_result(None)
            elif not done.done():
                done.set_exception(error)  # type: ignore[arg-type]

        self.listen(on_piece, on_end)
        await done
        return b"".join(pieces)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Ends the connection, unless the answer came whole and it can be used again; its end may still come within
        `linger_seconds`, for which nobody waits.
        """
        self._connection.let_go(linger_seconds)


class _Connection(asyncio.Protocol):
    """One connection with one request at a time; also what its parser calls."""

    def __init__(self, keep: Callable[[_Connection], None] | None) -> None:
        self._idle_since = 0.0
        self._keep = keep
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._error: BrokenError | None = None
        self._flows = True
        self._parser = httptools.HttpResponseParser(self)
        self._renew()

    def _renew(self) -> None:
        self._head: asyncio.Future[Answer] | None = None
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._on_piece: Callable[[bytes], None] | None = None
        self._on_end: Callable[[BrokenError | None], None] | None = None
        self._head_bytes = 0
        self._complete = False
        self._keeps = False

    # --- for the answer ------------------------------------------------------------------------------------------
    @property
    def is_closed(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._error is not None or self._transport is None or self._transport.is_closing()

    def is_fresh(self, idle_seconds: float) -> bool:
        """Whether something can be asked, and something was within so long."""
        return not self.is_closed and self._loop.time() - self._idle_since <= idle_seconds

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        """Sends a request, now; the head of its answer, or BrokenError, is to come. Who stops waiting closes."""
        assert self._transport is not None
        if self._error is not None:
            raise self._error
        self._head = self._loop.create_future()
        self._transport.write(request)
        return self._head

    def listen(self, on_piece: Callable[[bytes], None], on_end: Callable[[BrokenError | None], None]) -> None:
        """See Answer."""
        self._on_piece, self._on_end = on_piece, on_end
        self._hand_on()

    def flow(self, is_open: bool) -> None:
        """Whether bytes are read."""
        if self._transport is not None and is_open is not self._flows and not self._transport.is_closing():
            self._flows = is_open
            if is_open:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def let_go(self, linger_seconds: float = 0.0) -> None:
        """The answer is not needed any more."""
        self._on_piece = self._on_end = None
        if linger_seconds and self._keep is not None and not self._complete and not self.is_closed:
            timer = self._loop.call_later(linger_seconds, self.close)

            def on_end(_error: BrokenError | None) -> None:
                timer.cancel()
                self.let_go()

            self.flow(True)
            self.listen(lambda _: None, on_end)
            return
        if self._complete and self._keeps and self._keep is not None and not self.is_closed:
            self._renew()
            self.flow(True)
            self._idle_since = self._loop.time()
            self._keep(self)
        else:
            self.close()

    def close(self) -> None:
        """Ends the connection at once."""
        self._on_piece = self._on_end = None
        if self._transport is not None:
            self._transport.abort()

    # --- for the loop --------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # a stream's
        """Connected."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._head is None:
            self._fail("something came that was not asked for")
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"what came is not HTTP ({error})")
            return
        if not self._head.done():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fail(f"the head of the answer is longer than {MAX_HEAD_BYTES} bytes")
            return
        self._hand_on()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection ended. A body without a length ends with it."""
        has_length = "content-length" in self._headers or "transfer-encoding" in self._headers
        if error is None and self._head is not None and self._head.done() and not has_length:
            self._complete = True
        self._fail("the connection was closed", error)

    def _fail(self, said: str, cause: Exception | None = None) -> None:
        if self._error is None:
            self._error = BrokenError(said)
            self._error.__cause__ = cause
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()
        if self._head is not None and not self._head.done():
            self._head.set_exception(self._error)
        self._hand_on()

    def _hand_on(self) -> None:
        if self._on_piece is None:
            return
        if self._pieces:
            piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            self._on_piece(piece)
        if (self._complete or self._error is not None) and self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(None if self._complete else self._error)

    # --- for the parser ------------------------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        """An answer begins, or the one after an interim one. Whole, one has nothing behind it."""
        if self._complete:
            raise BrokenError("an answer that was not asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head is here; one that only says that more is to come (1xx) is forgotten."""
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = {}
        elif self._head is not None and not self._head.done():
            self._head.set_result(Answer(self, status, self._headers))

    def on_body(self, body: bytes) -> None:
        """A piece of the body, or of the next chunk of it."""
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if self._parser.get_status_code() >= 200:
            self._complete = True
            self._keeps = self._parser.should_keep_alive()
