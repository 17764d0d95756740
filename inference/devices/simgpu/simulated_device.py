"""One simulated device: a loopback port with ggml's RPC protocol and faults on demand.

A `Conversation` checks allocations against the `Memory` of the device. Each connection that sends something has
its own ggml server. The data of a process can be suspended: it is in host memory until it is resumed, and
requests of the process wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import struct
import sys
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headgate.shared import ports
from inference.devices.simgpu.backing import NoServerError, NotMovedError, Server, ServerEndedError, Servers
from inference.devices.simgpu.faults import ParsedCommand
from inference.devices.simgpu.rpc_relay import Pace, Relay
from inference.devices.simgpu.rpc_wire import Conversation, WireError
from inference.devices.simgpu.simulated_memory import ALL, Memory

log = logging.getLogger(__name__)

FIRST_BYTES = 2**16
QUIET_SECONDS = 1.0
"""Time for the running requests of a process before it is suspended."""
_LINGER = struct.Struct("@ii")
_TABLE = Path("/proc/net/tcp")
_LOCAL, _REMOTE, _INODE = 1, 2, 9
"""Columns, see proc_net_tcp."""


class StateError(ValueError):
    """The state of the device does not allow a valid command."""


@dataclass(eq=False)
class _Link:
    """A connection with a server. `pid` is its process while it is suspended, `owner` its process if it was found."""

    port: int
    relay: Relay
    server: Server
    pid: int | None = None
    owner: int | None = None


class Device:
    """A device with an `id` and an `endpoint` for llama.cpp."""

    def __init__(self, id: str, uuid: str, capacity_bytes: int, servers: Servers) -> None:
        self.id, self.uuid = id, uuid
        self.name = "simulated GPU"
        self.memory = Memory(capacity_bytes)
        self._full_bytes = capacity_bytes
        self._servers = servers
        self._numbers = itertools.count(1)
        self._connections: dict[int, asyncio.Task[None]] = {}
        self._links: dict[int, _Link] = {}
        self._turn = asyncio.Lock()
        """Lock for suspending and resuming."""
        self._listening: asyncio.Task[None] | None = None
        self._port = 0
        self._pace = Pace()
        self._cuts = 0
        self._tells = False
        """Whether it reports the bytes of each process."""

    @property
    def endpoint(self) -> str:
        """`host:port`. The port is the same after a cut, unless another process has taken it."""
        return f"127.0.0.1:{self._port}"

    async def open(self) -> None:
        """Starts to listen, unless it already does."""
        if self._listening is not None:
            return
        try:
            listener = socket.create_server(("127.0.0.1", self._port))
        except OSError:
            listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self._port = listener.getsockname()[1]
        self._listening = asyncio.create_task(self._listen(listener))

    async def close(self) -> None:
        """Stops listening and cuts every connection; returns when their servers have ended."""
        listening, self._listening = self._listening, None
        tasks = [*self._connections.values(), *([listening] if listening else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- control ---------------------------------------------------------------------------------------------------
    def status(self) -> dict[str, Any]:
        """Figures, faults and counters."""
        memory = self._settled()
        return {
            "id": self.id,
            "uuid": self.uuid,
            "name": self.name,
            "endpoint": self.endpoint,
            "lost": self._listening is None,
            "total_bytes": memory.capacity_bytes,
            "free_bytes": memory.free_bytes,
            "used_bytes": memory.used_bytes,
            "foreign_bytes": memory.foreign_bytes,
            "suspended_bytes": memory.suspended_bytes,
            "late_bytes": sum(size for _due, size in memory.late),
            "context_bytes": memory.context_bytes,
            "outside_bytes": memory.outside_bytes,
            "processes": self._processes(),
            "stalled": not self._pace.running.is_set(),
            "slow_seconds": self._pace.delay_seconds,
            "pace_seconds": self._pace.compute_seconds,
            "refusing": memory.failures_left > 0 or memory.successes_left is not None,
            "connections": len(self._connections),
            "requests": self._pace.requests,
            "cuts": self._cuts,
            **asdict(memory.counters),
        }

    async def run_command(self, command: ParsedCommand) -> None:
        """Runs one command; raises ValueError if it is not possible."""
        amount = command.amount
        match command.do:
            case "refuse":
                self.memory = replace(self.memory, failures_left=amount, successes_left=None)
            case "refuse_after":
                self.memory = replace(self.memory, successes_left=int(amount))
            case "cut":
                self._cuts += 1
                await self.close()
            case "return":
                await self.open()
            case "stall":
                self._pace.running.clear()
            case "unstall":
                self._pace.running.set()
            case "slow":
                self._pace.delay_seconds = amount
            case "pace":
                self._pace.compute_seconds = amount
            case "shrink":
                self.memory = self.memory.resized(int(amount))
            case "late":
                self.memory = replace(self.memory, late_seconds=amount)
            case "settle":
                self.memory = self.memory.settle(ALL)
            case "foreign":
                self.memory = self._settled().with_foreign(int(amount))
            case "contexts":
                self.memory = replace(self.memory, context_bytes=int(amount))
            case "pools":
                self.memory = replace(self.memory, pool_bytes=int(amount))
            case "tell":
                self._tells = True
                await asyncio.gather(*(self._find_owner(link) for link in self._links.values()))
            case "hide":
                self._tells = False
            case "suspend":
                async with self._turn:
                    await self._suspend(int(amount))
            case "resume":
                async with self._turn:
                    await self._resume(int(amount))
            case "heal":
                healed = replace(self.memory, failures_left=0, successes_left=None, late_seconds=0.0, foreign_bytes=0)
                healed = replace(healed, pool_bytes=0)
                self.memory = healed.settle(ALL).resized(self._full_bytes)
                self._pace.delay_seconds = self._pace.compute_seconds = 0.0
                self._pace.running.set()
                await self.open()

    def _processes(self) -> dict[int, int]:
        """The bytes of each process, if the device reports them."""
        found: dict[int, int] = {}
        for number, link in self._links.items() if self._tells else ():
            if link.owner is not None and (count := self.memory.bytes_of(number)):
                found[link.owner] = found.get(link.owner, 0) + count
        return found

    async def _find_owner(self, link: _Link) -> None:
        link.owner = await asyncio.to_thread(ports.connection_owner, link.port, self._port)

    def _settled(self) -> Memory:
        self.memory = self.memory.settle(_now())
        return self.memory

    # --- suspended processes ---------------------------------------------------------------------------------------
    async def _suspend(self, pid: int) -> None:
        if any(link.pid == pid for link in self._links.values()):
            raise ValueError(f"process {pid} is suspended on {self.id} already")
        client_ports = await asyncio.to_thread(ports_of, pid, self._port)
        holders = {number for number, _pointer in self.memory.held}
        links = {
            number: link for number, link in self._links.items() if link.port in client_ports and number in holders
        }
        if not links:
            raise StateError(f"process {pid} has no memory on {self.id}")
        await self._shut(pid, list(links.values()))
        for number, link in links.items():
            link.pid = pid
            theirs = {pointer: size for (owner, pointer), size in self.memory.held.items() if owner == number}
            await self._moved(pid, links, link.server.suspend(theirs))
        self.memory = self._settled().suspend(links, _now())

    async def _shut(self, pid: int, links: Collection[_Link]) -> None:
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                for link in links:
                    await link.relay.shut()
        except OSError as error:
            for link in links:
                link.relay.open()
            lost = f"lost its connection to {self.id} before the copy: {error}"
            problem = f"is using {self.id}" if isinstance(error, TimeoutError) else lost
            raise StateError(f"process {pid} {problem}") from None

    async def _resume(self, pid: int) -> None:
        links = {number: link for number, link in self._links.items() if link.pid == pid}
        if not links:
            raise StateError(f"process {pid} is not suspended on {self.id}")
        sizes = {
            number: sum(size for (owner, _pointer), size in self.memory.suspended.items() if owner == number)
            for number in links
        }
        self.memory, granted = self._settled().resume(links)
        if not granted:
            raise StateError(
                f"process {pid} needs {sum(sizes.values())} bytes of {self.id}, which has too little free memory"
                f" ({self.memory.free_bytes} are free)"
            )
        for number, link in links.items():
            await self._moved(pid, links, link.server.resume(sizes[number]))
        for link in links.values():
            link.pid = None
            link.relay.open()

    async def _moved(self, pid: int, links: Mapping[int, _Link], moving: Coroutine[Any, Any, None]) -> None:
        """Waits for one server; after a failure all connections of the process are closed.

        If a connection or a server has ended, the error is a StateError.
        """
        try:
            await moving
        except NotMovedError as error:
            has_ended = isinstance(error, ServerEndedError) or any(number not in self._links for number in links)
            for number in links:
                if number in self._connections:
                    self._connections[number].cancel()
            kind = StateError if has_ended else ValueError
            raise kind(f"the memory of process {pid} was not moved, and its connections are closed: {error}") from None

    # --- connections -----------------------------------------------------------------------------------------------
    async def _listen(self, listener: socket.socket) -> None:
        with listener:
            while True:
                client, _address = await asyncio.get_running_loop().sock_accept(listener)
                number = next(self._numbers)
                self._connections[number] = asyncio.create_task(self._serve(number, client))

    async def _serve(self, number: int, client: socket.socket) -> None:
        """Serves one connection until either side ends it."""
        loop = asyncio.get_running_loop()
        server: Server | None = None
        account = _Account(self, number)
        is_reusable = False
        try:
            if first := await loop.sock_recv(client, FIRST_BYTES):
                server = await self._servers.take()
                with socket.socket() as there:
                    there.setblocking(False)
                    await loop.sock_connect(there, ("127.0.0.1", server.port))
                    relay = Relay(client, there, Conversation(account), self._pace)
                    link = self._links[number] = _Link(client.getpeername()[1], relay, server)
                    self.memory = self._settled().connected(number)
                    if self._tells:
                        await self._find_owner(link)
                    await relay.run(first)
            is_reusable = not account.has_granted
        except (OSError, WireError, NoServerError) as error:
            log.warning("%s: connection %d is closed: %s", self.id, number, error)
        except asyncio.CancelledError:
            _reset(client)
        finally:
            client.close()
            self._links.pop(number, None)
            self.memory = self._settled().end(number, _now())
            del self._connections[number]
            if server is not None:
                await asyncio.shield(self._servers.give_back(server) if is_reusable else server.end())


class _Account:
    """One connection's view of the memory."""

    def __init__(self, device: Device, number: int) -> None:
        self._device, self._number = device, number
        self.has_granted = False

    def request(self, size_bytes: int) -> bool:
        self._device.memory, granted = self._device._settled().request(self._number, size_bytes)
        self.has_granted |= granted
        return granted

    def created(self, pointer: int, requested_bytes: int, size_bytes: int) -> None:
        self._device.memory = self._device.memory.created(self._number, pointer, requested_bytes, size_bytes)

    def creation_failed(self, requested_bytes: int) -> None:
        self._device.memory = self._device.memory.creation_failed(self._number, requested_bytes)

    def free(self, pointer: int) -> None:
        self._device.memory = self._device._settled().free(self._number, pointer, _now())

    def computed(self) -> None:
        self._device.memory = self._device._settled().computed(self._number)

    def memory(self) -> tuple[int, int]:
        memory = self._device._settled()
        return memory.free_bytes, memory.capacity_bytes


def _now() -> float:
    return asyncio.get_running_loop().time()


def _reset(side: socket.socket) -> None:
    """Ends the connection with a reset instead of a normal close."""
    with contextlib.suppress(OSError):  # it is closed already
        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(1, 0))


def ports_of(pid: int, port: int) -> frozenset[int]:
    """The client ports of the connections of `pid` to 127.0.0.1:`port`; empty for an ended process.

    Raises ValueError when the system does not show them.
    """
    if sys.platform != "linux":
        raise ValueError("the owner of a connection can be found on Linux only")
    try:
        mine = set(ports.socket_inodes(pid))
    except FileNotFoundError:
        return frozenset()
    except PermissionError:
        raise ValueError(f"the system does not show the connections of process {pid}") from None
    there = f"{int.from_bytes(socket.inet_aton('127.0.0.1'), sys.byteorder):08X}:{port:04X}"
    rows = (line.split() for line in _TABLE.read_text().splitlines()[1:])
    return frozenset(
        int(row[_LOCAL].partition(":")[2], 16) for row in rows if row[_REMOTE] == there and row[_INODE] in mine
    )
