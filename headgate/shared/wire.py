"""Lets an answer that has begun write its pieces at once, from any callback of the loop; decides nothing about them.

ASGI's `send` needs a task to await it, and so a turn of the loop and a wake-up for every token. Pieces of one turn
leave in one system call all the same: the transport gathers them.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_EXTENSION = "headgate.wire"


class Wire:
    """The body of one response without a length, between the first `send` of its status and the last of its body."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

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


class WiredHttp(HttpToolsProtocol):
    """uvicorn's HTTP that leaves a wire in the scope of every request."""

    _unanswered: tuple[RequestResponseCycle, ...] = ()

    def on_headers_complete(self) -> None:
        """A request's head is whole."""
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._unanswered = (*(cycle for cycle in self._unanswered if not cycle.response_complete), self.cycle)
            self.scope["extensions"] = {_EXTENSION: Wire(self.cycle)}  # type: ignore[dict-item]
            if len(self.pipeline) == 1:
                self.flow.resume_reading()  # uvicorn stops while one waits, and would not see the client leave

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left. uvicorn tells the last request only, though one that came before may be what is answered."""
        super().connection_lost(exc)
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._unanswered = ()


def take(scope: MutableMapping[str, Any]) -> Wire | None:
    """The wire of a request, once: it is taken out, so that nothing holds on to itself. None under another server."""
    extensions = scope.get("extensions")
    found = extensions.pop(_EXTENSION, None) if extensions else None
    return found if isinstance(found, Wire) else None
