"""Requests to clouds against raw servers: the kinds of errors, and no message quotes an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from openai import AsyncOpenAI

from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.cloud_http import CloudSender
from gateway.providers.http_clients import make_cloud_http, make_unused_client

pytestmark = pytest.mark.timeout(30)

HEAD = b"HTTP/1.1 200 OK\r\nx-secret: ann\r\n"

Ask = Callable[..., Awaitable[bytes]]
"""The body of the answer of a server; raises UpstreamError."""


@pytest.fixture
async def ask(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ask]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    senders = []

    async def ask(url: str, connect_seconds: float = 5.0) -> bytes:
        sdk = AsyncOpenAI(api_key="k", base_url=url, http_client=make_unused_client())
        senders.append(CloudSender(sdk, make_cloud_http(url), ()))
        return await senders[-1].whole("chat/completions", b"{}", connect_seconds, {})

    yield ask
    for sender in senders:
        await sender.aclose()


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
async def test_broken_answer_is_an_error_that_quotes_nothing(ask: Ask, pieces: tuple[bytes, ...]) -> None:
    async with raw_server(*pieces) as url:
        with pytest.raises(UpstreamError, match=r"broken connection to 127\.0\.0\.1: \w+") as caught:
            await ask(url)
    assert caught.value.kind is UpstreamKind.READ
    assert "ann" not in str(caught.value)


async def test_damaged_compression_is_an_unreadable_answer(ask: Ask) -> None:
    """It concerns the model, not the connection."""
    async with raw_server(HEAD + b"content-encoding: gzip\r\ncontent-length: 3\r\n\r\nann") as url:
        with pytest.raises(UpstreamError, match="unreadable answer from") as caught:
            await ask(url)
    assert caught.value.kind is UpstreamKind.MALFORMED
    assert "ann" not in str(caught.value)


async def test_long_header_is_accepted(ask: Ask) -> None:
    async with raw_server(HEAD + b"x-policy: " + b"a" * 20_000 + b"\r\ncontent-length: 2\r\n\r\nok") as url:
        assert await ask(url) == b"ok"


async def test_connect_timeout_includes_the_name_lookup(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", hang)
    async with asyncio.timeout(10):
        with pytest.raises(UpstreamError, match="connect timeout to") as caught:
            await ask("http://slow.invalid/", 0.1)
    assert caught.value.kind is UpstreamKind.CONNECT
