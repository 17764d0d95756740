"""uvicorn's HTTP protocol, with a `Wire` per request that writes answers without ASGI's `send`.

ASGI's `send` needs a task to await it, and so a turn of the loop and a wake-up for every token. A body that is here can
be had without awaiting it under a deadline, and the client's leaving without a task that waits for it, which costs
every request a twentieth.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

_EXTENSION = "headgate.wire"


class Wire:
    """One request and its response. Pieces are written to a body without a length, behind `begin` or the `send` of its
    status, and before `end` or the `send` of its last piece.
    """

    __slots__ = ("_cycle", "_tell")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
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
    """uvicorn's HTTP protocol with three differences.

    - The scope of every request holds a `Wire`.
    - Trailers of chunked requests are dropped. The parser reports them like headers, after the body.
    - Complete requests are answered before bytes behind them that are not HTTP end the connection.
    """

    _unanswered: tuple[Wire, ...] = ()

    def on_headers_complete(self) -> None:
        """The head of a request is complete."""
        before = self.cycle
        super().on_headers_complete()
        self.headers = []  # takes the trailers; the list in the scope holds the headers alone
        if self.cycle is not before:
            if self.scope["http_version"] == "1.0":
                self.cycle.__class__ = _Unchunked
            wire = Wire(self.cycle)
            if self.pipeline:
                self._unanswered = (*(one for one in self._unanswered if not one.is_answered), wire)
            else:
                self._unanswered = (wire,)  # a request that does not wait has no unanswered request before it
            self.scope["extensions"] = {_EXTENSION: wire}  # type: ignore[dict-item]
            if len(self.pipeline) == 1:
                self.flow.resume_reading()  # uvicorn stops reading, and then the client's leaving goes unnoticed

    def send_400_response(self, msg: str) -> None:
        """Handles a parser error; the parser takes no bytes after it. Complete requests are still answered; the
        connection ends behind the last of them.

        Without such a request the answer is an error, unless the answer to the malformed request has begun.
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
                self._unanswered[-1].leave()  # so that the application writes no second answer

    def refuse_malformed(self, msg: str) -> None:
        """Answers bytes that are not HTTP with status 400 and closes the connection."""
        super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left. uvicorn notifies the newest request only, but an older one may be the one being answered."""
        super().connection_lost(exc)
        unanswered, self._unanswered = self._unanswered, ()
        for wire in unanswered:
            wire.leave()


def take(scope: MutableMapping[str, Any]) -> Wire | None:
    """The wire of a request, once: it is taken out, so that nothing holds on to itself. None under another server."""
    extensions = scope.get("extensions")
    found = extensions.pop(_EXTENSION, None) if extensions else None
    return found if isinstance(found, Wire) else None
