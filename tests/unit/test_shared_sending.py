"""Bytes that leave now: all that the kernel takes, the rest and whatever is not plain by the transport, in order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import cast

import pytest

from headgate.shared.sending import send_now

LONG = bytes(range(256)) * 2**14


@pytest.fixture
async def ends() -> AsyncIterator[tuple[asyncio.WriteTransport, socket.socket]]:
    """A transport and the socket that reads what it writes."""
    near, far = socket.socketpair()
    far.setblocking(False)
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=near)
    yield transport, far
    transport.abort()
    far.close()


async def read(far: socket.socket, size: int) -> bytes:
    """The next `size` bytes."""
    found = b""
    while len(found) < size:
        found += await asyncio.get_running_loop().sock_recv(far, size - len(found))
    return found


async def test_they_are_there_before_the_turn_ends(ends: tuple[asyncio.WriteTransport, socket.socket]) -> None:
    transport, far = ends
    send_now(transport, b"at once")
    assert far.recv(100) == b"at once"


async def test_what_the_kernel_does_not_take_follows(ends: tuple[asyncio.WriteTransport, socket.socket]) -> None:
    transport, far = ends
    send_now(transport, LONG)
    send_now(transport, b"the second")
    assert transport.get_write_buffer_size(), "otherwise this test proves nothing"
    assert await read(far, len(LONG) + 10) == LONG + b"the second"


async def test_nothing_overtakes_what_waits(ends: tuple[asyncio.WriteTransport, socket.socket]) -> None:
    transport, far = ends
    transport.write(LONG)
    send_now(transport, b"behind it")
    assert await read(far, len(LONG) + 9) == LONG + b"behind it"


async def test_an_end_that_is_gone_is_for_the_transport_to_see(
    ends: tuple[asyncio.WriteTransport, socket.socket],
) -> None:
    transport, far = ends
    far.close()
    send_now(transport, b"to nobody")
    await asyncio.sleep(0)
    send_now(transport, b"and again")
    for _ in range(10):
        await asyncio.sleep(0)
    assert transport.is_closing()


class Recording:
    """A transport that keeps what it is given; nothing is ever written past it."""

    def __init__(self, *, closing: bool = False, encrypts: bool = False) -> None:
        self.closing = closing
        self.encrypts = encrypts
        self.written = b""

    def is_closing(self) -> bool:
        """Whether its descriptor may be somebody else's by now."""
        return self.closing

    def get_write_buffer_size(self) -> int:
        """Nothing waits."""
        return 0

    def get_extra_info(self, name: str) -> object:
        """What it says about itself; a socket it has not."""
        assert name == "sslcontext", "its socket is not to be touched"
        return object() if self.encrypts else None

    def write(self, data: bytes) -> None:
        """As a transport's."""
        self.written += data


@pytest.mark.parametrize("transport", [Recording(closing=True), Recording(encrypts=True)], ids=["closing", "tls"])
async def test_only_an_open_socket_without_tls_is_written_to(transport: Recording) -> None:
    send_now(cast(asyncio.WriteTransport, transport), b"plain text")
    assert transport.written == b"plain text"
