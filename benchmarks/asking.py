"""Asks over raw connections, at a rate that nobody's answers slow down or as fast as they come; knows no system.

Everything runs in the loop of the caller. An answer is timed from when it was due to be asked, not from when a busy
connection let it: who is late is late for all that wait behind.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httptools
import orjson

_CONTENT = re.compile(rb'"(?:content|text)":\s?"[^"]')
PATIENCE_SECONDS = 60.0


def request(
    port: int, body: Mapping[str, Any], headers: Mapping[str, str], path: str = "/v1/chat/completions"
) -> bytes:
    """The bytes of a POST to a port of loopback."""
    sent = orjson.dumps(body)
    lines = [f"POST {path} HTTP/1.1", f"host: 127.0.0.1:{port}", "content-type: application/json"]
    lines += [f"content-length: {len(sent)}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + sent


@dataclass(slots=True)
class Reply:
    """One answer. Times are of `time.perf_counter`; `pieces` are those of content, filled where they were asked for."""

    status: int = 0
    ended: float = 0.0
    first: float = 0.0
    pieces: list[float] = field(default_factory=list)
    text: bytes = b""
    broken: bool = False


class Connection(asyncio.Protocol):
    """One connection with one request at a time; also what its parser calls."""

    def __init__(self, keeps_times: bool = False) -> None:
        """`keeps_times` of every piece that came."""
        self._keeps_times = keeps_times
        self._reply = Reply()
        self._on_reply: Callable[[Reply], None] | None = None
        self._now = 0.0
        self.transport: asyncio.Transport

    @classmethod
    async def open(cls, port: int, keeps_times: bool = False) -> Connection:
        """A new one to a port of loopback."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: cls(keeps_times), "127.0.0.1", port)
        return connection

    def ask(self, request: bytes, on_reply: Callable[[Reply], None]) -> None:
        """Sends a request; `on_reply` is called with its whole answer, or with a broken one."""
        self._parser = httptools.HttpResponseParser(self)
        self._reply, self._on_reply = Reply(), on_reply
        self.transport.write(request)

    async def answer(self, request: bytes) -> Reply:
        """The whole answer; raises TimeoutError."""
        came = asyncio.get_running_loop().create_future()
        self.ask(request, lambda reply: None if came.done() else came.set_result(reply))
        async with asyncio.timeout(PATIENCE_SECONDS):
            reply: Reply = await came
        return reply

    async def begin(self, request: bytes) -> Reply:
        """The answer once its first content is here; it goes on."""
        began = asyncio.get_running_loop().create_future()
        self._on_first = lambda: None if began.done() else began.set_result(None)
        self.ask(request, lambda _: self._on_first())
        async with asyncio.timeout(PATIENCE_SECONDS):
            await began
        return self._reply

    def forget(self) -> None:
        """Leaves, whatever is still to come."""
        self._on_reply = None
        self.transport.abort()

    _on_first: Callable[[], None] = staticmethod(lambda: None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Connected."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self._now = time.perf_counter()
        self._parser.feed_data(data)

    def connection_lost(self, _error: Exception | None) -> None:
        """It is gone, and with it an answer that was not whole."""
        self._now = time.perf_counter()
        self._reply.broken = True
        self._end()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        reply = self._reply
        if not reply.first and _CONTENT.search(body):
            reply.first = self._now
            self._on_first()
        if self._keeps_times and reply.first:
            reply.pieces.append(self._now)
        if len(reply.text) < 600:
            reply.text += body

    def on_message_complete(self) -> None:
        """The answer is whole."""
        self._reply.status = self._parser.get_status_code()
        self._end()

    def _end(self) -> None:
        on_reply, self._on_reply = self._on_reply, None
        if on_reply is not None:
            self._reply.ended = self._now
            on_reply(self._reply)


async def close(*connections: Connection) -> None:
    """Breaks all of them off; nobody is told of answers that were not whole."""
    for connection in connections:
        connection.forget()
    await asyncio.sleep(0)  # then the sockets are closed


class FailedError(Exception):
    """An answer was not what was asked for."""


def check(reply: Reply) -> Reply:
    """The reply when it is whole and good; raises FailedError."""
    if reply.status != 200 or reply.broken or not reply.first:
        raise FailedError(f"status {reply.status}{', broken off' if reply.broken else ''}: {reply.text[:300]!r}")
    return reply


@dataclass(frozen=True, slots=True)
class Spans:
    """Seconds of every answer of a run, in their order: until its first content, and until its end."""

    first: list[float]
    whole: list[float]


async def at_rate(port: int, request: bytes, per_second: float, seconds: float) -> Spans:
    """Asks over one connection whenever it is due; raises FailedError."""
    connection = await Connection.open(port)
    spans = Spans([], [])
    try:
        begun = time.perf_counter()
        for number in range(int(per_second * seconds)):
            due = begun + number / per_second
            now = time.perf_counter()
            is_late = now > due
            if not is_late:
                await asyncio.sleep(due - now)
            asked = due if is_late else time.perf_counter()
            reply = check(await connection.answer(request))
            spans.first.append(reply.first - asked)
            spans.whole.append(reply.ended - asked)
    finally:
        await close(connection)
    return spans


@dataclass(frozen=True, slots=True)
class Rush:
    """What many connections got that asked as soon as they were answered. `whole` is seconds of each answer."""

    seconds: float
    whole: list[float]

    @property
    def per_second(self) -> float:
        """Answers per second."""
        return len(self.whole) / self.seconds


async def as_they_come(
    port: int, request: bytes, connections: int, seconds: float, most: int = 2**62, others: bytes | None = None
) -> Rush:
    """Every connection asks again as soon as it is answered, until `seconds` are over or `most` were answered; every
    second time for `others`, if there are any. Raises FailedError.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    opened = [await Connection.open(port) for _ in range(connections)]
    spans: list[float] = []
    begun = time.perf_counter()
    end = begun + seconds
    left = connections
    asked = 0

    def ask(connection: Connection) -> None:
        nonlocal asked
        asked += 1
        sent = time.perf_counter()

        def on_reply(reply: Reply) -> None:
            nonlocal left
            try:
                spans.append(check(reply).ended - sent)
            except FailedError as error:
                if not done.done():
                    done.set_exception(error)
                return
            if reply.ended < end and asked < most:
                ask(connection)
                return
            left -= 1
            if not left and not done.done():
                done.set_result(None)

        connection.ask(others if others is not None and asked % 2 else request, on_reply)

    try:
        for connection in opened:
            ask(connection)
        async with asyncio.timeout(seconds + PATIENCE_SECONDS):
            await done
        return Rush(time.perf_counter() - begun, spans)
    finally:
        await close(*opened)


async def streams(port: int, request: bytes, count: int, apart_seconds: float) -> list[list[float]]:
    """Opens `count` streams, one after the other; returns the times of the pieces of each. Raises FailedError."""
    opened = [await Connection.open(port, keeps_times=True) for _ in range(count)]
    try:
        asked = []
        for connection in opened:
            asked.append(asyncio.ensure_future(connection.answer(request)))
            await asyncio.sleep(apart_seconds)
        return [check(reply).pieces for reply in await asyncio.gather(*asked)]
    finally:
        await close(*opened)
