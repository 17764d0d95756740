"""Lets an answer that has begun write its pieces at once, from any callback of the loop, and takes a request whose head
is known past the parser; decides nothing about either.

ASGI's `send` needs a task to await it, and so a turn of the loop and a wake-up for every token. A body that is here can
be had without awaiting it under a deadline, and the client's leaving without a task that waits for it, which costs
every request a twentieth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headgate.shared.heads import Head, learn

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent, HTTPScope

_EXTENSION = "headgate.wire"

_HEADS_IN_VAIN = 4
"""After so many heads that never came again, a connection's are no longer remembered."""


class Wire:
    """One request and its response. Pieces are written to a body without a length, behind `begin` or the `send` of its
    status, and before `end` or the `send` of its last piece.
    """

    __slots__ = ("_cycle", "_tell", "head", "length")

    def __init__(self, cycle: RequestResponseCycle, head: Head | None = None, length: bytes = b"") -> None:
        self._cycle = cycle
        self.head = head
        """The request's, where it is known: others of the same connection have it too, but for the `length`."""
        self.length = length
        self._tell: Callable[[], None] | None = None

    def take_body(self) -> bytes | None:
        """The request's body if all of it is here, once; None when it is still to be received."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        return body

    def when_left(self, tell: Callable[[], None] | None) -> None:
        """Calls `tell` when the client leaves before the response's end, at once if it has left; None calls nobody.

        Instead of receiving: whoever waits for the next message would wake up too.
        """
        self._tell = tell
        if tell is None:
            return
        if self._cycle.disconnected:
            tell()
        else:
            self._cycle.flow.resume_reading()  # a long body stops it, and then nobody would see the client leave

    def leave(self) -> None:
        """The client left."""
        cycle = self._cycle
        if cycle.response_complete:
            return
        cycle.disconnected = True
        cycle.message_event.set()
        if self._tell is not None:
            self._tell()

    @property
    def is_answered(self) -> bool:
        """Whether the response ended."""
        return bool(self._cycle.response_complete)

    def answer(self, status: int, lines: bytes, body: bytes) -> bool:
        """Sends a whole response in one write; False when only `send` can, because something was sent or somebody has
        to be waited for. `lines` are headers as they stand on the wire and say nothing about length or connection.
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
        """Sends status and headers of a response whose pieces follow; False when only `send` can, as for `answer`."""
        if not self._may_begin or isinstance(self._cycle, _Unchunked):
            return False
        self._cycle.chunked_encoding = True
        self._cycle.transport.write(b"%btransfer-encoding: chunked\r\n\r\n" % self._head(status, lines))
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
        """Whether a piece can be written now: the response has begun and not ended, its reader is there and reads."""
        cycle = self._cycle
        return (
            cycle.response_started
            and not cycle.response_complete
            and not cycle.disconnected
            and not cycle.flow.write_paused
            and bool(cycle.chunked_encoding)
        )

    def write(self, data: bytes) -> None:
        """Writes one piece. Only while `is_free`, and while no `send` is awaited."""
        if data:  # an empty chunk would end the body
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self, data: bytes) -> None:
        """Writes the last piece. As `write`."""
        last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        self._cycle.transport.write(last)
        self._complete()


class _Unchunked(RequestResponseCycle):
    """A response to HTTP/1.0, which knows no chunks: a body without a length ends with the connection."""

    _has_length = True

    async def send(self, message: ASGISendEvent) -> None:
        """Sends the status and headers, or a piece of the body."""
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                self.chunked_encoding = False
        elif message["type"] == "http.response.body" and not self._has_length:
            self.expected_content_length = len(message.get("body", b""))  # as much is still to come as comes now
        await super().send(message)


class WiredHttp(HttpToolsProtocol):
    """uvicorn's HTTP that leaves a wire in the scope of every request.

    The parser sees no byte of a request that comes between two messages with the head of the last it parsed: for it,
    such a request never was.
    """

    _unanswered: tuple[Wire, ...] = ()
    _head: Head | None = None
    _next: RequestResponseCycle | None = None
    """Made ready for a request with this head."""
    _heads_in_vain = 0
    _is_between = True
    """Whether a message has ended, its answer still to come, and nothing came since; or nothing came at all."""
    _missing_bytes = 0
    """What has not come of the body of a request that the parser does not see."""

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._missing_bytes:
            self._unset_keepalive_if_required()
            data = self._take_missing(data)
            if not data:
                return
        head = self._head
        if (
            head is None
            or not self._is_between
            or not self.cycle.response_complete
            or not self.cycle.keep_alive
            or self.flow.write_paused
            or (rest := head.rest(data)) is None
        ):
            self._parse(data)
        else:
            self._begin_again(head, *rest)

    def _parse(self, data: bytes) -> None:
        is_whole_head = self._is_between
        before = self.cycle
        self._is_between = False
        super().data_received(data)
        if is_whole_head and self.cycle is not before and self._heads_in_vain < _HEADS_IN_VAIN:
            raw = data[: data.find(b"\r\n\r\n") + 4]
            # behind the request's first step, while it waits for somebody
            self.loop.call_soon(self._learn, raw, self.scope.copy(), self.url)

    def _learn(self, raw: bytes, scope: HTTPScope, url: bytes) -> None:
        is_last = self.headers is scope["headers"]
        if is_last and self.limit_concurrency is None and (head := learn(raw, scope, url)) is not None:
            self._head = head
            self._heads_in_vain += 1

    def _begin_again(self, head: Head, length: bytes, body: bytes) -> None:
        """A request whose head is known: what uvicorn does at its beginning, and for as much of its body as is here."""
        self._unset_keepalive_if_required()
        self._heads_in_vain = 0
        cycle, self._next = self._next or self._cycle_of(head), None
        cycle.default_headers = self.server_state.default_headers
        scope: Any = cycle.scope
        head.set_length(scope["headers"], length)
        wire = Wire(cycle, head, length)
        scope["extensions"] = {_EXTENSION: wire}
        self.scope, self.headers, self.cycle, self._unanswered = scope, scope["headers"], cycle, (wire,)
        self._start_asgi_task(cycle, self.app)
        if len(body) == int(length) <= HIGH_WATER_LIMIT:
            cycle.body = body  # type: ignore[assignment]  # nothing is added to it
            cycle.more_body = False
            cycle.message_event.set()
        else:
            self._is_between = False
            self._missing_bytes = int(length)
            self._take_missing(body)

    def _cycle_of(self, head: Head) -> RequestResponseCycle:
        """What a request with this head is to uvicorn, but for its length."""
        scope: Any = head.scope()
        scope["state"] = self.app_state.copy()
        return RequestResponseCycle(
            scope, self.transport, self.flow, self.logger, self.access_logger, self.access_log,
            [], asyncio.Event(), False, True, self.on_response_complete,
        )  # fmt: skip

    def on_response_complete(self) -> None:
        """An answer is written; there is time to make ready for the same head."""
        super().on_response_complete()
        if self._head is not None and self._next is None and not self.transport.is_closing():
            self._next = self._cycle_of(self._head)

    def _take_missing(self, data: bytes) -> bytes:
        """Takes what `data` has of the body, and returns what it has beyond."""
        missing = self._missing_bytes
        if piece := data[:missing]:
            self._missing_bytes -= len(piece)
            self.on_body(piece)
        if not self._missing_bytes:
            self.on_message_complete()
        return data[missing:]

    def on_message_begin(self) -> None:
        """A request's first byte came."""
        self._is_between = False
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """A request is whole."""
        super().on_message_complete()
        self._is_between = self.cycle is not None and not self.cycle.response_complete

    def on_headers_complete(self) -> None:
        """A request's head is whole."""
        self._head = self._next = None
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            if self.scope["http_version"] == "1.0":
                self.cycle.__class__ = _Unchunked
            wire = Wire(self.cycle)
            if self.pipeline:
                self._unanswered = (*(one for one in self._unanswered if not one.is_answered), wire)
            else:
                self._unanswered = (wire,)  # it does not wait, so all before it are answered
            self.scope["extensions"] = {_EXTENSION: wire}  # type: ignore[dict-item]
            if len(self.pipeline) == 1:
                self.flow.resume_reading()  # uvicorn stops while one waits, and would not see the client leave

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left. uvicorn tells the last request only, though one that came before may be what is answered."""
        super().connection_lost(exc)
        self._head = self._next = None
        unanswered, self._unanswered = self._unanswered, ()
        for wire in unanswered:
            wire.leave()


def take(scope: MutableMapping[str, Any]) -> Wire | None:
    """The wire of a request, once: it is taken out, so that nothing holds on to itself. None under another server."""
    extensions = scope.get("extensions")
    found = extensions.pop(_EXTENSION, None) if extensions else None
    return found if isinstance(found, Wire) else None
