"""On asyncio's own loop the second part of an answer waited 40 ms for an acknowledgment: Nagle's delay was left on."""

from __future__ import annotations

import asyncio
import socket

from headgate.shared import ports


async def test_a_small_write_leaves_at_once() -> None:
    taken: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        here: socket.socket = writer.get_extra_info("socket")
        taken.set_result(here.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with ports.listen("127.0.0.1", 0) as sock:
        async with await asyncio.start_server(take, sock=sock), asyncio.timeout(5):
            _, writer = await asyncio.open_connection(*sock.getsockname())
            assert await taken
            writer.close()
