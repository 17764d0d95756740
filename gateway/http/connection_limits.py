"""Limits of one client connection: headers, pipelining, slow readers, idle time.

Up to READ_AHEAD_BYTES of an answer are buffered for a slow reader while the provider continues at full speed. Beyond
that the provider has to wait, for a limited time.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import orjson

from gateway.http.http_exchange import Exchange
from headgate.shared.asgi import new_request_id
from headgate.shared.wire import WiredHttp
from inference.protocol import CODES, Code, error_body

MAX_HEADER_BYTES = 65536
"""Request line and headers together."""

MAX_HEADERS = 128

MAX_PIPELINED = 16
"""Requests that may wait on the same connection behind the one being answered."""

HEAD_SECONDS = 30.0
"""Time limit for the headers of a request; uvicorn closes idle connections."""

READ_AHEAD_BYTES = 512 * 1024
"""Unread bytes of an answer before its provider has to wait: about 2000 tokens as a stream."""

MIN_READ_BYTES = 64 * 1024
UNREAD_SECONDS = 30.0
"""A client that reads less than MIN_READ_BYTES of the buffered bytes within this time is disconnected."""

HELD_UP_SECONDS = 60.0
"""Total time for which a slow reader may delay its answer."""

MAX_CONNECTIONS = 4096


class _RefusedHead(Exception):  # noqa: N818  # the parser turns it into its own error
    """The headers of a request exceed a limit."""


class BoundedHttp(WiredHttp):
    """uvicorn's HTTP protocol with limits for headers (size and time), pipelined requests, unread bytes and their time,
    and the number of connections.

    When there are too many connections, the one that has been idle longest is closed; if none is idle, the new one.
    """

    head_seconds = HEAD_SECONDS
    unread_seconds = UNREAD_SECONDS
    held_up_seconds = HELD_UP_SECONDS
    max_connections = MAX_CONNECTIONS
    _header_bytes = 0
    _too_large: str | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None
    _unread_bytes = 0
    _held_up_since: float | None = None
    _held_up = 0.0
    _idle_since = 0.0

    # --- connections ------------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts a connection and starts the time limit for its first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=READ_AHEAD_BYTES, low=READ_AHEAD_BYTES - MIN_READ_BYTES)
        self._idle_since = self.loop.time()
        if len(self.connections) > self.max_connections and not self._close_idle():
            message = f"all of the gateway's {self.max_connections} connections are in use; try again shortly"
            self._refuse(Code.QUEUE_FULL, message, b"retry-after: 1")
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timers."""
        self._stop_head_timer()
        self._stop_watching()
        super().connection_lost(exc)

    @property
    def is_serving(self) -> bool:
        """Whether a request is being served on this connection, or waits."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_idle(self) -> bool:
        """Whether the connection can be closed without ending a request."""
        return not self.is_serving and not self.transport.is_closing()

    def _close_idle(self) -> bool:
        """Closes the connection that has been idle longest; returns whether there was one."""
        idle = [one for one in self.connections if isinstance(one, BoundedHttp) and one is not self and one.is_idle]
        if not idle:
            return False
        min(idle, key=lambda one: one._idle_since).transport.abort()
        return True

    # --- the reader -------------------------------------------------------------------------------------------------
    def pause_writing(self) -> None:
        """The buffer is full: the provider has to wait from now on."""
        super().pause_writing()
        self._held_up_since = self.loop.time()
        self._watch_reader()

    def resume_writing(self) -> None:
        """The client has read enough to continue."""
        self._note_held_up()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """The answer is written; reading it has a time limit too."""
        self._idle_since = self.loop.time()
        self._note_held_up()
        self._held_up = 0.0
        super().on_response_complete()
        self._note_paused()
        if not self.is_serving and self.transport.get_write_buffer_size():
            self._watch_reader()

    def _note_paused(self) -> None:
        """Starts to count the delay of an answer that begins while bytes of earlier answers are unread."""
        if self.flow.write_paused and self._held_up_since is None and self.is_serving:
            self._held_up_since = self.loop.time()
            self._watch_reader()

    def _note_held_up(self) -> None:
        if self._held_up_since is not None:
            self._held_up += self.loop.time() - self._held_up_since
            self._held_up_since = None

    def _watch_reader(self) -> None:
        """Sets the timer for reading some of the buffered bytes, and for the total delay of the answer."""
        self._stop_watching()
        self._unread_bytes = self.transport.get_write_buffer_size()
        wait = self.unread_seconds
        if self._held_up_since is not None and self.is_serving:
            wait = min(wait, max(0.0, self.held_up_seconds - self._held_up))
        self._reader_timer = self.loop.call_later(wait, self._check_reader, wait)

    def _check_reader(self, waited: float) -> None:
        self._reader_timer = None
        unread = self.transport.get_write_buffer_size()
        if self._held_up_since is None and (not unread or self.is_serving):
            return  # the client reads, or the bytes belong to an answer that is still being written
        is_late = waited >= self.unread_seconds and unread > self._unread_bytes - MIN_READ_BYTES
        held_up = self._held_up + (self.loop.time() - (self._held_up_since or self.loop.time()))
        if is_late or (self.is_serving and held_up >= self.held_up_seconds):
            self.transport.abort()
        else:
            self._watch_reader()

    def _stop_watching(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    # --- the head of a request --------------------------------------------------------------------------------------
    def data_received(self, data: bytes) -> None:
        """Bytes arrived. Without a request being served they begin a new one."""
        super().data_received(data)
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()

    def _await_head(self) -> None:
        if not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_seconds, self._drop)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _drop(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._header_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the request line."""
        self._header_bytes += len(url)
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse_head()
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > MAX_HEADER_BYTES or len(self.headers) >= MAX_HEADERS:
            self._refuse_head()
        super().on_header(name, value)

    def _refuse_head(self) -> None:
        if self._header_bytes > MAX_HEADER_BYTES:
            self._too_large = f"request line and headers have more than {MAX_HEADER_BYTES} bytes"
        else:
            self._too_large = f"there are more than {MAX_HEADERS} headers"
        raise _RefusedHead

    def on_headers_complete(self) -> None:
        """The headers are complete."""
        self._stop_head_timer()
        super().on_headers_complete()
        self._note_paused()
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()
            raise _RefusedHead

    def refuse_malformed(self, msg: str) -> None:
        """Answers a request that the parser rejects, with the error envelope and the headers of every response."""
        if self._too_large is not None:
            self._refuse(Code.HEADERS_TOO_LARGE, f"the request headers are too large: {self._too_large}")
        else:
            self._refuse(Code.INVALID_REQUEST, f"malformed HTTP request: {msg}")

    def _refuse(self, code: Code, message: str, *headers: bytes) -> None:
        """Sends an error and closes the connection."""
        status = HTTPStatus(CODES[code].status)
        exchange = Exchange(new_request_id(), {}, reason=code)
        body = orjson.dumps(error_body(code, message))
        head = [
            b"HTTP/1.1 %d %b" % (status, status.phrase.encode()), b"content-type: application/json",
            b"connection: close", b"content-length: %d" % len(body), *headers,
        ]  # fmt: skip
        self.transport.write(b"\r\n".join(head) + b"\r\n" + exchange.response_lines() + b"\r\n" + body)
        self.transport.close()
