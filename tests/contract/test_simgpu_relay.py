"""The relay of simulated devices passes every byte in order, large or small, also while it is stalled."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from inference.devices.simgpu.rpc_relay import BUFFER_BYTES, Pace, Relay
from inference.devices.simgpu.rpc_wire import Command, Conversation, reply, request
from tests.property.test_simgpu_wire import FREE, TOTAL, Book

WEIGHTS = random.Random(5).randbytes(3 * BUFFER_BYTES + 17)
SECONDS = 20.0


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _address = listener.accept()
    return one, other


class Ends:
    """The client end and the server end of a running relay."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.client, self._client = connected()
        self.server, self._server = connected()
        self.talk = Conversation(Book())
        for end in (self.client, self.server):
            end.setblocking(False)

    def run(self, first: bytes) -> asyncio.Task[None]:
        self.relay = Relay(self._client, self._server, self.talk, self.pace)
        return asyncio.create_task(self.relay.run(first))

    def close(self) -> None:
        for end in (self.client, self.server, self._client, self._server):
            end.close()


@asynccontextmanager
async def relayed(first: bytes) -> AsyncIterator[tuple[Ends, asyncio.Task[None]]]:
    ends = Ends(Pace())
    running = ends.run(first)
    try:
        async with asyncio.timeout(SECONDS):
            yield ends, running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        ends.close()


async def receive(end: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    found = bytearray()
    while len(found) < size:
        data = await loop.sock_recv(end, min(2**18, size - len(found)))
        assert data, "the connection ended too early"
        found += data
    return bytes(found)


async def test_weights_are_relayed_unchanged() -> None:
    """All pieces pass through one buffer, and the server reads more slowly than the client sends."""
    sent = request(Command.SET_TENSOR, WEIGHTS) + request(Command.FREE_BUFFER, bytes(8))
    async with relayed(sent[:5]) as (ends, _running):
        loop = asyncio.get_running_loop()
        _sent, arrived = await asyncio.gather(loop.sock_sendall(ends.client, sent[5:]), receive(ends.server, len(sent)))
        assert arrived == sent
        assert ends.pace.requests == 2


async def test_answer_of_the_relay_comes_after_that_of_the_server() -> None:
    """A client that requests a large tensor and the memory gets both in order."""
    requests = request(Command.GET_TENSOR, b"all") + request(Command.GET_DEVICE_MEMORY, bytes(4))
    async with relayed(requests) as (ends, _running):
        loop = asyncio.get_running_loop()
        assert await receive(ends.server, 12) == request(Command.GET_TENSOR, b"all")
        answers = reply(WEIGHTS) + reply(FREE.to_bytes(8, "little") + TOTAL.to_bytes(8, "little"))
        _sent, arrived = await asyncio.gather(
            loop.sock_sendall(ends.server, reply(WEIGHTS)), receive(ends.client, len(answers))
        )
        assert arrived == answers


async def test_computations_are_delayed_one_after_the_other() -> None:
    """Each takes `compute_seconds`, and waits for those of all connections before it."""
    pace = Pace()
    pace.compute_seconds = 0.05
    assert [pace.compute(2, 10.0), pace.compute(1, 10.0), pace.compute(1, 20.0)] == pytest.approx([0.1, 0.15, 0.05])
    async with relayed(request(Command.SET_TENSOR, b"abc")) as (ends, _running):
        ends.pace.compute_seconds = 0.05
        loop = asyncio.get_running_loop()
        await receive(ends.server, 12)
        began = loop.time()
        await loop.sock_sendall(ends.client, request(Command.GRAPH_COMPUTE, b"graph"))
        await receive(ends.server, 14)
        assert loop.time() - began >= 0.04


async def test_bytes_sent_during_a_stall_pass_after_it() -> None:
    """All of it, in order, and nothing before."""
    first, second = request(Command.BUFFER_CLEAR, bytes(9)), request(Command.SET_TENSOR, WEIGHTS)
    async with relayed(first) as (ends, _running):
        loop = asyncio.get_running_loop()
        assert await receive(ends.server, len(first)) == first
        ends.pace.running.clear()
        await loop.sock_sendall(ends.client, second)
        with pytest.raises(BlockingIOError):
            ends.server.recv(1)
        ends.pace.running.set()
        assert await receive(ends.server, len(second)) == second


async def test_client_that_disconnects_during_a_stall_ends_the_connection() -> None:
    first = request(Command.BUFFER_CLEAR, bytes(9))
    async with relayed(first) as (ends, running):
        assert await receive(ends.server, len(first)) == first
        ends.pace.running.clear()
        await asyncio.get_running_loop().sock_sendall(ends.client, first)
        ends.client.close()
        with pytest.raises(ConnectionError, match="stalled"):
            await running


async def test_either_side_can_end_the_connection() -> None:
    for name in ("client", "server"):
        async with relayed(request(Command.BUFFER_CLEAR, bytes(9))) as (ends, running):
            await receive(ends.server, 18)
            getattr(ends, name).close()
            await running


MARK = request(Command.DEVICE_COUNT)


async def test_connection_is_paused_between_two_requests() -> None:
    """After the running request was answered and the server is idle; the client does not notice."""
    first, second = request(Command.GET_TENSOR, b"all"), request(Command.SET_TENSOR, WEIGHTS)
    async with relayed(first) as (ends, _running):
        loop = asyncio.get_running_loop()
        await receive(ends.server, len(first))
        shutting = asyncio.create_task(ends.relay.shut())
        await asyncio.sleep(0)
        with pytest.raises(BlockingIOError):
            ends.server.recv(1)  # no request arrives while an answer is due
        await loop.sock_sendall(ends.server, reply(b"here"))
        assert await receive(ends.client, len(reply(b"here"))) == reply(b"here")
        assert await receive(ends.server, len(MARK)) == MARK
        await loop.sock_sendall(ends.client, second)
        assert not shutting.done()
        await loop.sock_sendall(ends.server, reply(bytes(4)))
        await shutting
        with pytest.raises(BlockingIOError):
            ends.server.recv(1)
        ends.relay.open()
        assert await receive(ends.server, len(second)) == second
        with pytest.raises(BlockingIOError):
            ends.client.recv(1)


async def test_cancelled_pause_leaves_the_connection_open() -> None:
    """The server is busy with a command without an answer."""
    first, second = request(Command.GRAPH_COMPUTE, b"graph"), request(Command.BUFFER_CLEAR, bytes(9))
    async with relayed(first) as (ends, _running):
        await receive(ends.server, len(first))
        shutting = asyncio.create_task(ends.relay.shut())
        assert await receive(ends.server, len(MARK)) == MARK
        shutting.cancel()
        await asyncio.gather(shutting, return_exceptions=True)
        await asyncio.get_running_loop().sock_sendall(ends.client, second)
        assert await receive(ends.server, len(second)) == second


async def test_client_that_disconnects_during_a_pause_ends_the_connection() -> None:
    first = request(Command.BUFFER_CLEAR, bytes(9))
    async with relayed(first) as (ends, running):
        await receive(ends.server, len(first))
        shutting = asyncio.create_task(ends.relay.shut())
        await receive(ends.server, len(MARK))
        await asyncio.get_running_loop().sock_sendall(ends.server, reply(bytes(4)))
        await shutting
        ends.client.close()
        await running
