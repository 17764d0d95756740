"""One simulated device: a loopback port that speaks ggml's RPC, with faults on demand; places no model.

Bytes go through a `Conversation`, which decides allocations against the device's `Memory`; behind each connection
computes a ggml server of its own. A connection that says nothing gets none.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from inference.devices.simgpu.backing import NoServerError, Server, Servers
from inference.devices.simgpu.core.faults import Order
from inference.devices.simgpu.core.memory import ALL, Memory
from inference.devices.simgpu.core.wire import Conversation, Flow, WireError

log = logging.getLogger(__name__)

CHUNK_BYTES = 2**20
MOST_HELD_BYTES = 64 * 2**20
"""Of a stalled connection in one direction; what is more waits in the sockets."""


class Device:
    """`id` names it; `endpoint` is where llama.cpp finds it."""

    def __init__(self, id: str, uuid: str, capacity_bytes: int, servers: Servers) -> None:
        self.id, self.uuid = id, uuid
        self.name = "simulated GPU"
        self.memory = Memory(capacity_bytes)
        self._full_bytes = capacity_bytes
        self._servers = servers
        self._numbers = itertools.count(1)
        self._connections: dict[int, asyncio.Task[None]] = {}
        self._listener: asyncio.Server | None = None
        self._port = 0
        self._delay_seconds = 0.0
        self._passing = asyncio.Event()
        self._passing.set()
        self._cuts = self._requests = 0

    @property
    def endpoint(self) -> str:
        """`host:port`; the port is the same after a cut, unless somebody took it meanwhile."""
        return f"127.0.0.1:{self._port}"

    async def open(self) -> None:
        """Listens; a device that does already stays as it is."""
        if self._listener is not None:
            return
        try:
            self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self._port, limit=CHUNK_BYTES)
        except OSError:
            self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=CHUNK_BYTES)
        self._port = self._listener.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stops listening and cuts every connection; returns when their servers are gone."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        tasks = list(self._connections.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- control ---------------------------------------------------------------------------------------------------
    def status(self) -> dict[str, Any]:
        """Figures, faults and counters; bytes are bytes."""
        memory = self._settled()
        return {
            "id": self.id,
            "uuid": self.uuid,
            "name": self.name,
            "endpoint": self.endpoint,
            "lost": self._listener is None,
            "total_bytes": memory.capacity_bytes,
            "free_bytes": memory.free_bytes,
            "used_bytes": memory.used_bytes,
            "foreign_bytes": memory.foreign_bytes,
            "late_bytes": sum(size for _due, size in memory.late),
            "stalled": not self._passing.is_set(),
            "slow_seconds": self._delay_seconds,
            "refusing": memory.refusing > 0,
            "connections": len(self._connections),
            "requests": self._requests,
            "cuts": self._cuts,
            **asdict(memory.counters),
        }

    async def obey(self, order: Order) -> None:
        """Carries one command out; raises ValueError when it cannot be."""
        amount = order.amount
        match order.do:
            case "refuse":
                self.memory = replace(self.memory, refusing=amount)
            case "cut":
                self._cuts += 1
                await self.close()
            case "return":
                await self.open()
            case "stall":
                self._passing.clear()
            case "slow":
                self._delay_seconds = amount
            case "shrink":
                self.memory = self.memory.resized(int(amount))
            case "late":
                self.memory = replace(self.memory, late_seconds=amount)
            case "settle":
                self.memory = self.memory.settle(ALL)
            case "foreign":
                self.memory = self._settled().taken(int(amount))
            case "heal":
                healed = replace(self.memory, refusing=0, late_seconds=0.0, foreign_bytes=0)
                self.memory = healed.settle(ALL).resized(self._full_bytes)
                self._delay_seconds = 0.0
                self._passing.set()
                await self.open()

    def _settled(self) -> Memory:
        self.memory = self.memory.settle(_now())
        return self.memory

    # --- connections -----------------------------------------------------------------------------------------------
    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(self._numbers)
        task = asyncio.current_task()
        assert task is not None
        self._connections[number] = task
        server: Server | None = None
        try:
            if first := await reader.read(CHUNK_BYTES):
                server = await self._servers.take()
                await self._relay(number, first, server, reader, writer)
        except (OSError, WireError, NoServerError) as error:
            log.warning("%s: connection %d is cut: %s", self.id, number, error)
        except asyncio.CancelledError:
            _reset(writer)
        finally:
            writer.transport.abort()
            self.memory = self._settled().end(number, _now())
            del self._connections[number]
            if server is not None:
                await asyncio.shield(server.end())

    async def _relay(
        self,
        number: int,
        first: bytes,
        server: Server,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Lets bytes pass in both directions until one side ends."""
        back, forth = await asyncio.open_connection("127.0.0.1", server.port, limit=CHUNK_BYTES)
        for side in (writer, forth):
            side.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        talk = Conversation(_Account(self, number))
        await self._pass(talk.from_client(first), forth, writer)
        pumps = [
            asyncio.create_task(self._pump(source, step, forth, writer))
            for source, step in ((reader, talk.from_client), (back, talk.from_server))
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                if pump.done():
                    pump.result()
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            forth.transport.abort()

    async def _pump(
        self,
        source: asyncio.StreamReader,
        step: Callable[[bytes], Flow],
        to_server: asyncio.StreamWriter,
        to_client: asyncio.StreamWriter,
    ) -> None:
        """One direction, until its source ends."""
        while data := await source.read(CHUNK_BYTES):
            if not self._passing.is_set():
                data += await self._stalled(source)
            await self._pass(step(data), to_server, to_client)

    async def _stalled(self, source: asyncio.StreamReader) -> bytes:
        """What arrives until the stall is over; raises ConnectionError when the source ends before."""
        held: list[bytes] = []
        over = asyncio.create_task(self._passing.wait())
        try:
            while not self._passing.is_set():
                room = sum(map(len, held)) < MOST_HELD_BYTES
                if not room:
                    await over
                    break
                more = asyncio.create_task(source.read(CHUNK_BYTES))
                await asyncio.wait({over, more}, return_when=asyncio.FIRST_COMPLETED)
                if not more.done():
                    more.cancel()
                    await asyncio.gather(more, return_exceptions=True)
                elif data := more.result():
                    held.append(data)
                else:
                    raise ConnectionError("it ended while the device was stalled")
        finally:
            over.cancel()
        return b"".join(held)

    async def _pass(self, flow: Flow, to_server: asyncio.StreamWriter, to_client: asyncio.StreamWriter) -> None:
        self._requests += flow.requests
        if self._delay_seconds and flow.requests:
            await asyncio.sleep(self._delay_seconds * flow.requests)
        for writer, pieces in ((to_server, flow.to_server), (to_client, flow.to_client)):
            if pieces:
                writer.writelines(pieces)
                await writer.drain()


class _Account:
    """One connection's view of the memory."""

    def __init__(self, device: Device, number: int) -> None:
        self._device, self._number = device, number

    def ask(self, size_bytes: int) -> bool:
        self._device.memory, granted = self._device._settled().ask(self._number, size_bytes)
        return granted

    def made(self, pointer: int, asked_bytes: int, size_bytes: int) -> None:
        self._device.memory = self._device.memory.made(self._number, pointer, asked_bytes, size_bytes)

    def unmade(self, asked_bytes: int) -> None:
        self._device.memory = self._device.memory.unmade(self._number, asked_bytes)

    def free(self, pointer: int) -> None:
        self._device.memory = self._device._settled().free(self._number, pointer, _now())

    def memory(self) -> tuple[int, int]:
        memory = self._device._settled()
        return memory.free_bytes, memory.capacity_bytes


def _now() -> float:
    return asyncio.get_running_loop().time()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Makes the end of the connection a reset, which nobody mistakes for an orderly one."""
    with contextlib.suppress(OSError):  # it is closed already
        linger = (1).to_bytes(4, "little") + bytes(4)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
