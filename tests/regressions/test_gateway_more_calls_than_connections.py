"""The 513th call to a cloud waited for a connection of ours, and that none came free was held against the provider."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator

import pytest

from gateway.providers.http_clients import make_sdk_client
from gateway.providers.sdk_stream import timeout_of

CALLS = 520


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """Enough of them for both ends of every connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * CALLS)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_every_call_that_the_door_lets_in_has_a_connection() -> None:
    """`admission.max_in_flight` may be any number."""
    arrived, all_here = 0, asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        await reader.readuntil(b"\r\n\r\n")
        arrived += 1
        if arrived == CALLS:
            all_here.set()
        await all_here.wait()
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=CALLS)
    port = server.sockets[0].getsockname()[1]
    async with server, make_sdk_client(connect_seconds=20) as client:
        calls = [client.get(f"http://127.0.0.1:{port}/", timeout=timeout_of(20)) for _ in range(CALLS)]
        async with asyncio.timeout(15):
            answers = await asyncio.gather(*calls)
    assert {said.status_code for said in answers} == {204}
