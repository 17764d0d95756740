"""The transport of the SDKs against raw servers: its errors are those of httpx2, and no message quotes an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx2
import pytest

from gateway.providers.http_clients import make_sdk_client

pytestmark = pytest.mark.timeout(30)

HEAD = b"HTTP/1.1 200 OK\r\nx-secret: ann\r\n"


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx2.AsyncClient]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    async with make_sdk_client(5.0) as client:
        yield client


@asynccontextmanager
async def raw_server(*pieces: bytes) -> AsyncIterator[str]:
    """Sends `pieces` after the head of a request, each after the one before it has left, then closes."""

    running: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.append(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        await asyncio.gather(*running)


@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (HEAD,),
        (b"ann\r\n\r\n",),
        (HEAD + b"content-length: 50\r\n\r\n", b"ann"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"3\r\nann\r\n"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"3\r\nann\r\n", b"ann\r\n"),
        (HEAD + b"ann" * 30_000 + b": 1\r\n\r\n",),
    ],
)
async def test_broken_answer_is_a_protocol_error_that_quotes_nothing(
    client: httpx2.AsyncClient, pieces: tuple[bytes, ...]
) -> None:
    async with raw_server(*pieces) as url:
        with pytest.raises(httpx2.RemoteProtocolError) as caught:
            await client.post(url, content=b"{}")
    assert str(caught.value)
    assert "ann" not in str(caught.value)


async def test_long_header_is_accepted(client: httpx2.AsyncClient) -> None:
    async with raw_server(HEAD + b"x-policy: " + b"a" * 20_000 + b"\r\ncontent-length: 2\r\n\r\nok") as url:
        assert (await client.post(url, content=b"{}")).text == "ok"


async def test_connect_timeout_includes_the_name_lookup(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", hang)
    async with asyncio.timeout(10):
        with pytest.raises(httpx2.ConnectTimeout):
            await client.post("http://slow.invalid/", content=b"{}", timeout=httpx2.Timeout(None, connect=0.1))
