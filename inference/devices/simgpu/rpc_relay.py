"""Moves the bytes of one connection between a client and its ggml server.

Bytes that a `Conversation` permits pass through one buffer per direction, which is filled again when it is empty: data
is copied twice, and a slow client does not block other connections.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

from inference.devices.simgpu.rpc_wire import Conversation, Flow, Piece

BUFFER_BYTES = 2**20
MAX_HELD_BYTES = 64 * 2**20
"""Buffered bytes of a stalled connection per direction; further bytes wait in the sockets."""
_JOINED_BYTES = 2**16
"""Pieces up to this size together are sent in one call, because copying them costs less than another call."""


class Pace:
    """How fast a device works: not at all while it is stalled, with a delay per request, and a least time per
    computation.

    The computations of all connections follow each other. The least time passes without use of the CPU.
    """

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.running.set()
        self.delay_seconds = 0.0
        self.compute_seconds = 0.0
        self.requests = 0
        self._computes_until = 0.0

    def compute(self, count: int, now: float) -> float:
        """The seconds until `count` computations that are requested now have ended."""
        self._computes_until = max(self._computes_until, now) + count * self.compute_seconds
        return self._computes_until - now


class Relay:
    """Relays the bytes of one connection in both directions. The caller closes the sockets.

    While it is shut, bytes of the client wait.
    """

    def __init__(self, client: socket.socket, server: socket.socket, talk: Conversation, pace: Pace) -> None:
        self._loop = asyncio.get_running_loop()
        self._client, self._server = client, server
        self._talk, self._pace = talk, pace
        self._turn = asyncio.Lock()
        """Lock for writing to the client, because answers come from the server and from the relay."""
        self._open = asyncio.Event()
        self._open.set()
        self._passing = 0
        self._passed = asyncio.Event()
        for side in (client, server):
            side.setblocking(False)
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def run(self, first: bytes) -> None:
        """Relays until one side ends; `first` has already come from the client. Raises OSError and WireError."""
        await self._pass(self._talk.from_client(first))
        tasks = [
            asyncio.create_task(self._relay_direction(source, step))
            for source, step in ((self._client, self._talk.from_client), (self._server, self._talk.from_server))
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def shut(self) -> None:
        """Stops requests at a moment when the server has completed all earlier ones.

        Until then requests pass. A cancelled call leaves the relay open.
        """
        await self._quiet()
        self._open.clear()
        try:
            await self._pass(self._talk.mark())
            await self._quiet()
        except BaseException:
            self.open()
            raise

    def open(self) -> None:
        """Lets requests pass again, waiting ones first."""
        self._open.set()

    async def _quiet(self) -> None:
        while self._passing or not self._talk.is_quiet:
            self._passed.clear()
            await self._passed.wait()

    async def _relay_direction(self, source: socket.socket, step: Callable[[Piece], Flow]) -> None:
        """Relays one direction until its source ends."""
        gates = (self._pace.running, self._open) if source is self._client else (self._pace.running,)
        buffer = memoryview(bytearray(BUFFER_BYTES))
        while count := await self._loop.sock_recv_into(source, buffer):
            data: Piece = buffer[:count]
            while not all(gate.is_set() for gate in gates):
                data = bytes(data) + await self._stalled(source, gates)
            await self._pass(step(data))
            if count == BUFFER_BYTES:  # more bytes wait; lets other tasks run first
                await asyncio.sleep(0)

    async def _stalled(self, source: socket.socket, gates: Sequence[asyncio.Event]) -> bytes:
        """The bytes that arrive until the gates are open; raises ConnectionError if the source ends before.

        They are read in a callback, because a cancelled task could lose them.
        """
        held = bytearray()
        ended: asyncio.Future[Any] = self._loop.create_future()

        def take() -> None:
            try:
                data = source.recv(BUFFER_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            held.extend(data)
            if not data:
                ended.set_exception(ConnectionError("it ended while the device was stalled"))
            if not data or len(held) >= MAX_HELD_BYTES:
                self._loop.remove_reader(source)

        over = asyncio.create_task(_all_open(gates))
        self._loop.add_reader(source, take)
        try:
            await asyncio.wait({over, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._loop.remove_reader(source)
            over.cancel()
        if ended.done():
            ended.result()
        return bytes(held)

    async def _pass(self, flow: Flow) -> None:
        self._pace.requests += flow.requests
        self._passing += 1
        try:
            if self._pace.delay_seconds and flow.requests:
                await asyncio.sleep(self._pace.delay_seconds * flow.requests)
            if self._pace.compute_seconds and flow.computations:
                await asyncio.sleep(self._pace.compute(flow.computations, self._loop.time()))
            await self._send(self._server, flow.to_server)
            if flow.to_client:
                async with self._turn:
                    await self._send(self._client, flow.to_client)
        finally:
            self._passing -= 1
            self._passed.set()

    async def _send(self, target: socket.socket, pieces: Sequence[Piece]) -> None:
        if len(pieces) > 1 and sum(map(len, pieces)) <= _JOINED_BYTES:
            pieces = (b"".join(pieces),)
        for piece in pieces:
            await self._loop.sock_sendall(target, piece)


async def _all_open(gates: Sequence[asyncio.Event]) -> None:
    """Waits until each of `gates` has been open."""
    for gate in gates:
        await gate.wait()
