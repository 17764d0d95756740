"""Holds one client connection to its bounds: head, pipelining, reading, idling; knows no route and no request.

What a client can hold by being slow is bounded in bytes and seconds. Up to READ_AHEAD_BYTES of an answer wait for a
slow reader while the tier goes on at its own speed; beyond them the tier is held up, and that has an end.
"""

from __future__ import annotations

import asyncio
import secrets
from http import HTTPStatus

import orjson

from gateway.http.http_exchange import Exchange, Told
from headgate.shared.wire import WiredHttp
from inference.protocol import CODES, Code, error_body

MAX_HEADER_BYTES = 65536
"""Of a request's line and headers together."""

MAX_HEADERS = 128

MAX_PIPELINED = 16
"""Requests that may wait behind the one being answered on the same connection."""

HEAD_SECONDS = 30.0
"""A connection that does not finish its request's head for so long is dropped; uvicorn watches idle ones."""

READ_AHEAD_BYTES = 512 * 1024
"""What may be unread of an answer before its tier is held up: some 2000 tokens as a stream."""

LEAST_READ_BYTES = 64 * 1024
UNREAD_SECONDS = 30.0
"""A client that reads less than LEAST_READ_BYTES of what waits for it in so long is gone."""

HELD_UP_SECONDS = 60.0
"""An answer that its reader held up for so long in all is cut off."""

MAX_CONNECTIONS = 4096


class _RefusedHead(Exception):  # noqa: N818  # the parser turns it into its own error
    """The head of a request is beyond a bound."""


class BoundedHttp(WiredHttp):
    """uvicorn's HTTP with bounds: on a request's head (then 431) and the time it takes to come, on requests that wait
    behind another, on what a client leaves unread and for how long, and on how many connections there are.

    When there are too many, the one that has been idle longest makes room.
    """

    head_seconds = HEAD_SECONDS
    unread_seconds = UNREAD_SECONDS
    held_up_seconds = HELD_UP_SECONDS
    most_connections = MAX_CONNECTIONS
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
        """A client connected: its first request is awaited."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=READ_AHEAD_BYTES, low=READ_AHEAD_BYTES - LEAST_READ_BYTES)
        self._idle_since = self.loop.time()
        if len(self.connections) > self.most_connections and not self._makes_room():
            said = f"all of the gateway's {self.most_connections} connections are in use; try again shortly"
            self._refuse(Code.QUEUE_FULL, said, b"retry-after: 1")
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._head_came()
        self._stop_watching()
        super().connection_lost(exc)

    @property
    def is_serving(self) -> bool:
        """Whether a request is being served here, or waits to be."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_idle(self) -> bool:
        """Whether dropping this connection would end no request."""
        return not self.is_serving and not self.transport.is_closing()

    def _makes_room(self) -> bool:
        """Drops the connection that has been idle longest; whether there was one."""
        idle = [one for one in self.connections if isinstance(one, BoundedHttp) and one is not self and one.is_idle]
        if not idle:
            return False
        min(idle, key=lambda one: one._idle_since).transport.abort()
        return True

    # --- the reader -------------------------------------------------------------------------------------------------
    def pause_writing(self) -> None:
        """As much is unread as may be: what is being computed for this client is held up from here."""
        super().pause_writing()
        self._held_up_since = self.loop.time()
        self._watch_reader()

    def resume_writing(self) -> None:
        """The client has read on."""
        self._note_held_up()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """An answer is written, though perhaps not read: that has its time too."""
        self._idle_since = self.loop.time()
        self._note_held_up()
        self._held_up = 0.0
        super().on_response_complete()
        self._note_paused()
        if not self.is_serving and self.transport.get_write_buffer_size():
            self._watch_reader()

    def _note_paused(self) -> None:
        """An answer that begins behind one that is not read is held up from its beginning."""
        if self.flow.write_paused and self._held_up_since is None and self.is_serving:
            self._held_up_since = self.loop.time()
            self._watch_reader()

    def _note_held_up(self) -> None:
        if self._held_up_since is not None:
            self._held_up += self.loop.time() - self._held_up_since
            self._held_up_since = None

    def _watch_reader(self) -> None:
        """Looks again when the client should have read some of what waits now, or has held up its answer too long."""
        self._stop_watching()
        self._unread_bytes = self.transport.get_write_buffer_size()
        wait = self.unread_seconds
        if self._held_up_since is not None and self.is_serving:
            wait = min(wait, max(0.0, self.held_up_seconds - self._held_up))
        self._reader_timer = self.loop.call_later(wait, self._look_at_reader, wait)

    def _look_at_reader(self, waited: float) -> None:
        self._reader_timer = None
        unread = self.transport.get_write_buffer_size()
        if self._held_up_since is None and (not unread or self.is_serving):
            return  # it reads, or what waits belongs to an answer that goes on
        is_late = waited >= self.unread_seconds and unread > self._unread_bytes - LEAST_READ_BYTES
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
        """Bytes came; unless a request is being served now, they begin one."""
        super().data_received(data)
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()

    def _await_head(self) -> None:
        if not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_seconds, self._drop)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _drop(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def on_message_begin(self) -> None:
        """A new request begins."""
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
            self._too_large = f"line and headers have more than {MAX_HEADER_BYTES} bytes"
        else:
            self._too_large = f"there are more than {MAX_HEADERS} headers"
        raise _RefusedHead

    def on_headers_complete(self) -> None:
        """A request's head is whole."""
        self._head_came()
        super().on_headers_complete()
        self._note_paused()
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()
            raise _RefusedHead

    def refuse_malformed(self, msg: str) -> None:
        """Answers what the parser refuses with the error envelope and the headers of every response."""
        if self._too_large is not None:
            self._refuse(Code.HEADERS_TOO_LARGE, f"the head of the request is too large: {self._too_large}")
        else:
            self._refuse(Code.INVALID_REQUEST, f"this is not HTTP as it should be: {msg}")

    def _refuse(self, code: Code, said: str, *headers: bytes) -> None:
        """Answers without a request, and ends the connection."""
        status = HTTPStatus(CODES[code].status)
        exchange = Exchange(f"req_{secrets.token_hex(12)}", Told({}), reason=code)
        body = orjson.dumps(error_body(code, said))
        head = [
            b"HTTP/1.1 %d %b" % (status, status.phrase.encode()), b"content-type: application/json",
            b"connection: close", b"content-length: %d" % len(body), *headers,
        ]  # fmt: skip
        self.transport.write(b"\r\n".join(head) + b"\r\n" + exchange.response_lines() + b"\r\n" + body)
        self.transport.close()
