"""A TCP proxy before the inference service that breaks selected streams after selected frames, in its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tests.rigs.link_proxy import Ends, until_one_ends

GENERATIONS = (b"POST /v1/chat/completions ", b"POST /v1/completions ")


@dataclass(frozen=True)
class Break:
    """Ends a stream after `frames` frames with text. Without `kill` the connection is cut.

    `kill` ends the worker; then the error of the service passes, but no frames that the worker had already written,
    because a slower model would not have written them.
    """

    frames: int
    kill: Callable[[], None] | None = None


class CuttingProxy:
    """A context manager. `plan` sets the breaks of the next streams in order; other streams pass completely."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._plans: deque[Break] = deque()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cutting proxy")
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.broken = 0
        """Streams that were broken."""

    @property
    def url(self) -> str:
        """The address of the proxy."""
        return f"http://127.0.0.1:{self.port}"

    def plan(self, *breaks: Break) -> None:
        """Sets the breaks of the next streams and replaces earlier ones."""
        self._plans = deque(breaks)

    def __enter__(self) -> CuttingProxy:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            service = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
        else:
            await _Connection(self, (reader, writer), service).run()
        finally:
            self._tasks.discard(task)

    def _next(self) -> Break | None:
        return self._plans.popleft() if self._plans else None


class _Connection:
    def __init__(self, proxy: CuttingProxy, caller: Ends, service: Ends) -> None:
        self._proxy = proxy
        self._caller, self._service = caller, service
        self._break: Break | None = None

    async def run(self) -> None:
        try:
            await until_one_ends(self._forth(), self._back())
        finally:
            for _reader, writer in (self._caller, self._service):
                writer.transport.abort()

    async def _forth(self) -> None:
        while data := await self._caller[0].read(65536):
            if data.startswith(GENERATIONS):
                self._break = self._proxy._next()
            self._service[1].write(data)

    async def _back(self) -> None:
        while data := await self._service[0].read(65536):
            if self._break is None:
                self._caller[1].write(data)
            elif not await self._broken(data, self._break):
                return

    async def _broken(self, data: bytes, plan: Break) -> bool:
        """Passes a stream on up to its break; returns whether the connection continues."""
        service, caller = self._service[0], self._caller[1]
        while b"\r\n\r\n" not in data:
            data += await service.read(65536)
        head, _, rest = data.partition(b"\r\n\r\n")
        if b"text/event-stream" not in head:
            self._break = None
            caller.write(data)
            return True
        caller.write(head + b"\r\n\r\n")
        frames, pending, text = _Chunks(rest, service), b"", 0
        killed = has_error = False
        while (piece := await frames.next()) is not None:
            *whole, pending = (pending + piece).split(b"\n\n")
            for frame in whole:
                has_error = has_error or (killed and b'"error"' in frame)
                if not killed or has_error:
                    caller.write(_chunk(frame + b"\n\n"))
                text += _has_text(frame)
                if text == plan.frames and not killed:
                    self._proxy.broken += 1
                    await caller.drain()
                    if plan.kill is None:
                        return False
                    await asyncio.to_thread(plan.kill)
                    killed = True
        if killed and not has_error:
            return False
        caller.write(b"0\r\n\r\n")
        self._break = None
        return True


class _Chunks:
    """The payloads of a chunked body."""

    def __init__(self, begun: bytes, reader: asyncio.StreamReader) -> None:
        self._data, self._reader = begun, reader

    async def next(self) -> bytes | None:
        line = await self._until(b"\r\n")
        if line is None:
            return None
        size = int(line, 16)
        while len(self._data) < size + 2:
            if not (more := await self._reader.read(65536)):
                return None
            self._data += more
        piece, self._data = self._data[:size], self._data[size + 2 :]
        return piece or None

    async def _until(self, end: bytes) -> bytes | None:
        while end not in self._data:
            with contextlib.suppress(ConnectionError):
                if more := await self._reader.read(65536):
                    self._data += more
                    continue
            return None
        line, _, self._data = self._data.partition(end)
        return line


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _has_text(frame: bytes) -> bool:
    for key in (b'"content":"', b'"text":"', b'"reasoning_content":"'):
        begin = frame.find(key) + len(key)
        if begin >= len(key) and frame[begin : begin + 1] != b'"':
            return True
    return False
