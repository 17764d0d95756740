"""Lets an answer that has begun write its pieces at once, from any callback of the loop; decides nothing about them.

ASGI's `send` needs a task to await it, and so a turn of the loop and a wake-up for every token. A body that is here can
be had without awaiting it under a deadline, and the client's leaving without a task that waits for it, which costs
every request a twentieth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
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

    def answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """Sends a whole response in one write; False when only `send` can, because something was sent or somebody has
        to be waited for. `headers` hold no line breaks and say nothing about length or connection.
        """
        if not self._may_begin:
            return False
        cycle = self._cycle
        cycle.chunked_encoding = False
        head = self._head(status, headers)
        cycle.transport.write(b"%b\r\ncontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self._complete()
        return True

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Sends status and headers of a response whose pieces follow; False when only `send` can, as for `answer`."""
        if not self._may_begin or isinstance(self._cycle, _Unchunked):
            return False
        self._cycle.chunked_encoding = True
        self._cycle.transport.write(b"%b\r\ntransfer-encoding: chunked\r\n\r\n" % self._head(status, headers))
        return True

    @property
    def _may_begin(self) -> bool:
        cycle = self._cycle
        return not (
            cycle.response_started or cycle.disconnected or cycle.flow.write_paused or cycle.scope["method"] == "HEAD"
        )

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        cycle = self._cycle
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        lines = [STATUS_LINE[status][:-2], *map(b": ".join, cycle.default_headers), *map(b": ".join, headers)]
        if not cycle.keep_alive:
            lines.append(b"connection: close")
        return b"\r\n".join(lines)

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
    """uvicorn's HTTP that leaves a wire in the scope of every request."""

    _unanswered: tuple[Wire, ...] = ()

    def on_headers_complete(self) -> None:
        """A request's head is whole."""
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
        unanswered, self._unanswered = self._unanswered, ()
        for wire in unanswered:
            wire.leave()


def take(scope: MutableMapping[str, Any]) -> Wire | None:
    """The wire of a request, once: it is taken out, so that nothing holds on to itself. None under another server."""
    extensions = scope.get("extensions")
    found = extensions.pop(_EXTENSION, None) if extensions else None
    return found if isinstance(found, Wire) else None
