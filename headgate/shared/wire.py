"""uvicorn's HTTP protocol with a `Wire` per request, which reads and writes without ASGI's `receive` and `send`.

A task must await ASGI's `send`, which costs an iteration of the event loop and a wake-up per token. A `Wire` returns a
complete body without a deadline around `receive`, and reports a disconnect without a waiting task; this saves about 5 %
of the time of a request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

_EXTENSION = "headgate.wire"


class Wire:
    """One request and its response.

    `write` is for a body without a length: after `begin` (or `send` of the status) and before `end` (or `send` of the
    last piece).
    """

    __slots__ = ("_cycle", "_on_disconnect", "_unsent_head")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._unsent_head = b""
        self._on_disconnect: Callable[[], None] | None = None

    def take_body(self) -> bytes | None:
        """Removes and returns the request's body; None while it is incomplete, and after a disconnect."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        return body

    def on_disconnect(self, call: Callable[[], None] | None) -> None:
        """Sets the function that is called when the client disconnects before the end of the response.

        It is called immediately if the client has disconnected already. None removes it.
        """
        self._on_disconnect = call
        if call is None:
            return
        if self._cycle.disconnected:
            call()
        else:
            self._cycle.flow.resume_reading()  # a long body pauses reading, which would hide the disconnect

    def disconnect(self) -> None:
        """Ends the request as after a disconnect of the client; does not close the connection."""
        cycle = self._cycle
        if cycle.response_complete:
            return
        cycle.disconnected = True
        cycle.message_event.set()
        if self._on_disconnect is not None:
            self._on_disconnect()

    @property
    def is_answered(self) -> bool:
        """Whether the response is complete."""
        return bool(self._cycle.response_complete)

    def answer(self, status: int, lines: bytes, body: bytes) -> bool:
        """Sends a complete response in one write. Returns False when the caller must use `send`: the response has
        begun, the client has disconnected or reads slowly, or the method is HEAD.

        `lines` are encoded headers without Content-Length and Connection.
        """
        if not self._may_begin:
            return False
        cycle = self._cycle
        cycle.chunked_encoding = False
        head = self._head(status, lines)
        cycle.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self._complete()
        return True

    def begin(self, status: int, lines: bytes) -> bool:
        """Begins a chunked response. Returns False in the cases of `answer`, and for HTTP/1.0.

        Status and headers are sent with the first piece, in one packet: `write` or `end` must follow without an await.
        """
        if not self._may_begin or isinstance(self._cycle, _Unchunked):
            return False
        self._cycle.chunked_encoding = True
        self._unsent_head = b"%btransfer-encoding: chunked\r\n\r\n" % self._head(status, lines)
        return True

    @property
    def _may_begin(self) -> bool:
        cycle = self._cycle
        return not (
            cycle.response_started or cycle.disconnected or cycle.flow.write_paused or cycle.scope["method"] == "HEAD"
        )

    def _head(self, status: int, lines: bytes) -> bytes:
        cycle = self._cycle
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        own = b"".join([b"%b: %b\r\n" % header for header in cycle.default_headers])
        return STATUS_LINE[status] + own + (lines if cycle.keep_alive else lines + b"connection: close\r\n")

    def _complete(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()

    @property
    def is_free(self) -> bool:
        """Whether `write` is possible: a chunked response has begun and is not complete, and the client is connected
        and reads fast enough.
        """
        cycle = self._cycle
        return (
            cycle.response_started
            and not cycle.response_complete
            and not cycle.disconnected
            and not cycle.flow.write_paused
            and bool(cycle.chunked_encoding)
        )

    def write(self, data: bytes) -> None:
        """Writes one piece. Requires `is_free` and no pending `send`."""
        if ready := self._with_head(data):
            self._cycle.transport.write(ready)

    def end(self, data: bytes) -> None:
        """Writes the last piece, under the conditions of `write`."""
        self._cycle.transport.write(self._with_head(data) + b"0\r\n\r\n")
        self._complete()

    def _with_head(self, data: bytes) -> bytes:
        """The chunk for `data`, after the head of the response if that is not sent yet."""
        head, self._unsent_head = self._unsent_head, b""
        if not data:
            return head  # an empty chunk would end the body
        return b"%b%x\r\n%b\r\n" % (head, len(data), data)


class _Unchunked(RequestResponseCycle):
    """A response to HTTP/1.0, which has no chunks: a body without a length ends with the connection."""

    _has_length = True

    async def send(self, message: ASGISendEvent) -> None:
        """Sends the status and headers, or a piece of the body."""
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                self.chunked_encoding = False
        elif message["type"] == "http.response.body" and not self._has_length:
            self.expected_content_length = len(message.get("body", b""))  # uvicorn expects no more than this piece
        await super().send(message)


class WiredHttp(HttpToolsProtocol):
    """uvicorn's HTTP protocol with these differences.

    - The scope of every request holds a `Wire`.
    - Trailers of chunked requests are dropped. The parser reports them like headers, after the body.
    - Complete requests are answered when malformed bytes follow them; then the connection is closed.
    - A disconnect is noticed and reported for all unanswered requests, not only for the newest one.
    """

    _unanswered: tuple[Wire, ...] = ()

    def on_headers_complete(self) -> None:
        """The head of a request is complete."""
        before = self.cycle
        super().on_headers_complete()
        self.headers = []  # receives the trailers; the list in the scope keeps only the headers
        if self.cycle is not before:
            if self.scope["http_version"] == "1.0":
                self.cycle.__class__ = _Unchunked
            wire = Wire(self.cycle)
            if self.pipeline:
                self._unanswered = (*(earlier for earlier in self._unanswered if not earlier.is_answered), wire)
            else:
                self._unanswered = (wire,)  # a request that does not wait has no unanswered request before it
            self.scope["extensions"] = {_EXTENSION: wire}  # type: ignore[dict-item]
            if len(self.pipeline) == 1:
                self.flow.resume_reading()  # uvicorn pauses reading, which would hide a disconnect

    def send_400_response(self, msg: str) -> None:
        """Handles a parser error, after which the parser accepts no bytes.

        Complete requests are still answered; then the connection is closed. Without a complete request the response has
        status 400; if the response to the malformed request has begun, the connection is aborted instead.
        """
        complete = [wire._cycle for wire in self._unanswered if not wire.is_answered]
        malformed = complete.pop() if complete and complete[-1].more_body else None
        if complete:
            complete[-1].keep_alive = False
        elif malformed is not None and malformed.response_started:
            self.transport.abort()
        else:
            self.refuse_malformed(msg)
            if malformed is not None:
                self._unanswered[-1].disconnect()  # so that the application writes no second response

    def refuse_malformed(self, msg: str) -> None:
        """Answers bytes that are not HTTP with status 400 and closes the connection."""
        super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notifies all unanswered requests. uvicorn notifies only the newest one."""
        super().connection_lost(exc)
        unanswered, self._unanswered = self._unanswered, ()
        for wire in unanswered:
            wire.disconnect()


class QuietServer(uvicorn.Server):
    """uvicorn's server without its signal handlers, which close the port first and exit with status 143."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process."""
        yield


def server_config(app: Any, *, http: type[HttpToolsProtocol] = WiredHttp, **options: Any) -> uvicorn.Config:
    """uvicorn's configuration for every service: without its logs, WebSockets, proxy headers and `Server` header."""
    common = {"ws": "none", "log_config": None, "access_log": False, "proxy_headers": False, "server_header": False}
    return uvicorn.Config(app, http=http, **common, **options)  # type: ignore[arg-type]


def take(scope: MutableMapping[str, Any]) -> Wire | None:
    """Removes the wire from the scope of a request, which ends a reference cycle. None if the scope has none."""
    extensions = scope.get("extensions")
    found = extensions.pop(_EXTENSION, None) if extensions else None
    return found if isinstance(found, Wire) else None
