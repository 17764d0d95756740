"""A load generator on raw connections: requests at a fixed rate, or as fast as answers come.

Everything runs in the event loop of the caller. At a fixed rate, latency counts from the time at which the request was
due, also if the connection was still busy then, so that a slow answer delays all later ones.
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

_CONTENT = re.compile(rb'"(?:content|text|arguments)":\s?"[^"]')
TIMEOUT_SECONDS = 60.0
TAIL_BYTES = 32


def request(
    port: int, body: Mapping[str, Any], headers: Mapping[str, str], path: str = "/v1/chat/completions"
) -> bytes:
    """The bytes of a POST request to a port on loopback."""
    sent = orjson.dumps(body)
    lines = [f"POST {path} HTTP/1.1", f"host: 127.0.0.1:{port}", "content-type: application/json"]
    lines += [f"content-length: {len(sent)}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + sent


@dataclass(slots=True)
class Reply:
    """One answer. Times are of `time.perf_counter`. `pieces`: times of the pieces of content, if they are recorded.

    `text` is its beginning, `tail` its end.
    """

    status: int = 0
    ended: float = 0.0
    first: float = 0.0
    pieces: list[float] = field(default_factory=list)
    text: bytes = b""
    tail: bytes = b""
    broken: bool = False


class Connection(asyncio.Protocol):
    """One connection with one request at a time. It is also the callback object of its HTTP parser."""

    def __init__(self, keeps_times: bool = False) -> None:
        """`keeps_times`: record the time of every piece of content."""
        self._keeps_times = keeps_times
        self._reply = Reply()
        self._on_reply: Callable[[Reply], None] | None = None
        self._now = 0.0
        self.transport: asyncio.Transport

    @classmethod
    async def open(cls, port: int, keeps_times: bool = False) -> Connection:
        """Connects to a port on loopback."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: cls(keeps_times), "127.0.0.1", port)
        return connection

    def ask(self, request: bytes, on_reply: Callable[[Reply], None]) -> None:
        """Sends a request. `on_reply` gets the complete or the broken answer."""
        self._parser = httptools.HttpResponseParser(self)
        self._reply, self._on_reply = Reply(), on_reply
        self.transport.write(request)

    async def answer(self, request: bytes) -> Reply:
        """Returns the complete or the broken answer. Raises TimeoutError."""
        came = asyncio.get_running_loop().create_future()
        self.ask(request, lambda reply: None if came.done() else came.set_result(reply))
        async with asyncio.timeout(TIMEOUT_SECONDS):
            reply: Reply = await came
        return reply

    async def begin(self, request: bytes) -> Reply:
        """Returns when the first content has arrived, or the answer has ended without any. Raises TimeoutError."""
        began = asyncio.get_running_loop().create_future()
        self._on_first = lambda: None if began.done() else began.set_result(None)
        self.ask(request, lambda _: self._on_first())
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await began
        return self._reply

    def forget(self) -> None:
        """Aborts the connection without calling `on_reply`."""
        self._on_reply = None
        self.transport.abort()

    _on_first: Callable[[], None] = staticmethod(lambda: None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._parser.feed_data(data)

    def connection_lost(self, _error: Exception | None) -> None:
        self._now = time.perf_counter()
        self._reply.broken = True
        self._end()

    def on_body(self, body: bytes) -> None:
        reply = self._reply
        if not reply.first and _CONTENT.search(body):
            reply.first = self._now
            self._on_first()
        if self._keeps_times and reply.first:
            reply.pieces.append(self._now)
        if len(reply.text) < 600:
            reply.text += body
        reply.tail = (reply.tail + body)[-TAIL_BYTES:]

    def on_message_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()
        self._end()

    def _end(self) -> None:
        on_reply, self._on_reply = self._on_reply, None
        if on_reply is not None:
            self._reply.ended = self._now
            on_reply(self._reply)


async def close(*connections: Connection) -> None:
    """Aborts connections without reporting incomplete answers."""
    for connection in connections:
        connection.forget()
    await asyncio.sleep(0)  # the loop closes the sockets


class FailedError(Exception):
    """An answer has another status, is incomplete, or has no content."""


def check(reply: Reply) -> Reply:
    """Returns a complete reply with status 200 and content. A stream ends with [DONE]. Raises FailedError."""
    if reply.status != 200 or reply.broken or not reply.first:
        raise FailedError(f"status {reply.status}{', broken off' if reply.broken else ''}: {reply.text[:300]!r}")
    if reply.text.startswith((b"data:", b":")) and b"[DONE]" not in reply.tail:
        raise FailedError(f"a stream without its end: ... {reply.tail!r}")
    return reply


@dataclass(frozen=True, slots=True)
class Spans:
    """Seconds of each answer of a run, in order: to its first content (`first`) and to its end (`whole`)."""

    first: list[float]
    whole: list[float]


async def at_rate(port: int, request: bytes, per_second: float, seconds: float) -> Spans:
    """Sends requests over one connection at a fixed rate. Raises FailedError."""
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
    """Answers of many connections, each of which sends its next request at once. `whole`: seconds of each answer."""

    seconds: float
    whole: list[float]

    @property
    def per_second(self) -> float:
        return len(self.whole) / self.seconds


async def as_they_come(
    port: int, request: bytes, connections: int, seconds: float, most: int = 2**62, others: bytes | None = None
) -> Rush:
    """Sends the next request on each connection as soon as it has its answer, for `seconds` or `most` requests.

    Every second request is `others`, if given. Raises FailedError.
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
        async with asyncio.timeout(seconds + TIMEOUT_SECONDS):
            await done
        return Rush(time.perf_counter() - begun, spans)
    finally:
        await close(*opened)


async def streams(port: int, request: bytes, count: int, apart_seconds: float) -> list[list[float]]:
    """Opens `count` streams, `apart_seconds` apart. Returns the times of the pieces of each. Raises FailedError."""
    opened = [await Connection.open(port, keeps_times=True) for _ in range(count)]
    try:
        asked = []
        for connection in opened:
            asked.append(asyncio.ensure_future(connection.answer(request)))
            await asyncio.sleep(apart_seconds)
        return [check(reply).pieces for reply in await asyncio.gather(*asked)]
    finally:
        await close(*opened)
