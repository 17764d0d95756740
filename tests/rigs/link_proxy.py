"""A TCP proxy for one pair of processes: it delays, cuts, silences or fails their connections. In one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Coroutine, Iterator
from enum import StrEnum
from typing import Any

_CHUNK = 65536
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_ERROR = (
    b'{"error":{"message":"the node is sick","type":"server_error","param":null,"code":"internal_error","headgate":{}}}'
)
_ANSWER = b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(_ERROR),
    _ERROR,
)

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class LinkState(StrEnum):
    """What happens to bytes of a link."""

    OPEN = "open"
    CUT = "cut"
    """Connections break, and new ones are refused."""
    SILENT = "silent"
    """Nothing arrives until the link is open again; new connections wait, too."""


_WORST = (LinkState.CUT, LinkState.SILENT, LinkState.OPEN)


class Link:
    """Passes connections from `port` (known after `start`) to `target` on, each piece after `delay` seconds.

    `failing`: beginnings of HTTP requests that get an error of the inference service after `hold` seconds instead of
    being passed on; `failed` has the times of each. Pipelined requests are not supported.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self.port = 0
        self.delay = 0.0
        self.failing: tuple[bytes, ...] = ()
        self.hold = 0.0
        self.failed: list[tuple[float, float]] = []
        self._states: list[LinkState] = []
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> Link:
        """Returns when it listens."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def close(self) -> None:
        """Ends all connections."""
        if self._server is not None:
            self._server.close()
        self._abort()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def state(self) -> LinkState:
        """The worst of the states that it has now."""
        return min(self._states, key=_WORST.index, default=LinkState.OPEN)

    @contextlib.contextmanager
    def being(self, state: LinkState) -> Iterator[None]:
        """In this state for a while, or in a worse one that it has as well."""
        self._states.append(state)
        self._changed()
        try:
            yield
        finally:
            self._states.remove(state)
            self._changed()

    def _changed(self) -> None:
        if self.state is LinkState.SILENT:
            self._is_open.clear()
        else:
            self._is_open.set()
        if self.state is LinkState.CUT:
            self._abort()

    def _abort(self) -> None:
        for task in tuple(self._connections):
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        there: asyncio.StreamWriter | None = None
        try:
            if self.state is LinkState.CUT:
                return
            await self._is_open.wait()
            back, there = await asyncio.open_connection("127.0.0.1", self._target)
            await self._join((reader, writer), (back, there))
        except (OSError, asyncio.CancelledError, asyncio.IncompleteReadError):
            pass  # the other end sees a broken connection
        finally:
            self._connections.discard(task)
            for end in (writer, there):
                if end is not None:
                    end.transport.abort()

    async def _join(self, caller: Ends, service: Ends) -> None:
        await until_one_ends(self._forth(caller, service), self._pass(service[0], caller[1]))

    async def _forth(self, caller: Ends, service: Ends) -> None:
        while data := await caller[0].read(_CHUNK):
            if self.failing and data.startswith(self.failing):
                await self._fail(data, caller)
            else:
                await self._send(data, service[1])

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            await self._send(data, writer)

    async def _send(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        if self.delay:
            await asyncio.sleep(self.delay)
        await self._is_open.wait()
        writer.write(data)
        await writer.drain()

    async def _fail(self, data: bytes, caller: Ends) -> None:
        """Reads the rest of the request, and answers it."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            while b"\r\n\r\n" not in data:
                data += await _some(caller[0])
            head, _, body = data.partition(b"\r\n\r\n")
            length = _LENGTH.search(head)
            missing = (int(length[1]) if length else 0) - len(body)
            if missing > 0:
                await caller[0].readexactly(missing)
            await asyncio.sleep(self.hold)
            caller[1].write(_ANSWER)
            await caller[1].drain()
        finally:
            self.failed.append((began, loop.time()))


async def until_one_ends(*works: Coroutine[Any, Any, None]) -> None:
    """Runs these until one of them ends, and cancels the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _some(reader: asyncio.StreamReader) -> bytes:
    data = await reader.read(_CHUNK)
    if not data:
        raise asyncio.IncompleteReadError(b"", None)
    return data
