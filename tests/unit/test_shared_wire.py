"""A `Wire` writes to a connection of uvicorn: between the chunks of `send`, not before the response begins or after it
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headgate.shared import wire
from headgate.shared.wire import QuietServer, server_config

HEAD = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 0\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncIterator[tuple[str, int]]:
    """Serve `app`, and yield its address."""
    server = QuietServer(server_config(app, port=0, lifespan="off", **options))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0)
    try:
        yield server.servers[0].sockets[0].getsockname()[:2]
    finally:
        server.should_exit = True
        await task


async def body_of(address: tuple[str, int]) -> bytes:
    """The raw body of a response."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(HEAD)
    await reader.readuntil(b"\r\n\r\n")
    body = await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    return body


async def test_pieces_are_written_between_those_of_send() -> None:
    frees: list[bool] = []

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        found = wire.take(scope)
        assert found is not None
        assert wire.take(scope) is None, "the wire was removed from the scope"
        frees.append(found.is_free)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        frees.append(found.is_free)
        found.write(b"one")
        found.write(b"")
        await send({"type": "http.response.body", "body": b"two", "more_body": True})
        found.write(b"a third that is longer")
        await send({"type": "http.response.body", "body": b""})
        frees.append(found.is_free)

    async with serving(app) as address:
        assert await body_of(address) == b"3\r\none\r\n3\r\ntwo\r\n16\r\na third that is longer\r\n0\r\n\r\n"
        assert await body_of(address) == b"3\r\none\r\n3\r\ntwo\r\n16\r\na third that is longer\r\n0\r\n\r\n"
    assert frees == [False, True, False] * 2


@pytest.mark.parametrize("last", [b"", b"two"])
async def test_wire_writes_the_same_bytes_as_send(last: bytes) -> None:
    """The connection can be reused afterwards."""
    headers = [(b"content-type", b"text/plain"), (b"x-a", b"b")]
    lines = b"content-type: text/plain\r\nx-a: b\r\n"

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        found = wire.take(scope)
        assert found is not None
        if scope["path"] == "/send":
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"one", "more_body": True})
            await send({"type": "http.response.body", "body": last})
            return
        assert found.begin(200, lines)
        assert not found.begin(200, lines)
        assert not found.answer(200, lines, b"")
        found.write(b"one")
        found.end(last)
        assert found.is_answered
        assert not found.is_free

    async with serving(app) as address:
        for closing in (b"", b"connection: close\r\n"):
            responses = []
            reader, writer = await asyncio.open_connection(*address)
            for path in (b"/wire", b"/wire", b"/send") if not closing else (b"/wire",):
                writer.write(b"POST %b HTTP/1.1\r\nhost: here\r\n%bcontent-length: 0\r\n\r\n" % (path, closing))
                head = await reader.readuntil(b"\r\n\r\n")
                responses.append((sorted(head.split(b"\r\n")), await reader.readuntil(b"\r\n0\r\n\r\n")))
            assert responses == responses[:1] * len(responses)
            assert (b"connection: close" in responses[0][0]) == bool(closing)
            if closing:
                assert await reader.read() == b""
            writer.close()


@pytest.mark.parametrize("begins", [True, False])
async def test_answer_without_headers_has_a_head(begins: bool) -> None:
    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        found = wire.take(scope)
        assert found is not None
        if begins:
            assert found.begin(200, b"")
            found.end(b"all")
        else:
            assert found.answer(200, b"", b"all")

    async with serving(app, date_header=False) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HEAD)
        length = b"transfer-encoding: chunked" if begins else b"content-length: 3"
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n"
        assert await reader.readuntil(b"all") in (b"3\r\nall", b"all")
        writer.close()


async def test_wire_is_not_used_for_http_1_0() -> None:
    """HTTP 1.0 has no chunks."""

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        found = wire.take(scope)
        assert found is not None
        assert not found.begin(200, b"")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert not found.is_free
        await send({"type": "http.response.body", "body": b"all"})

    async with serving(app) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"POST / HTTP/1.0\r\ncontent-length: 0\r\n\r\n")
        assert (await reader.read()).endswith(b"\r\n\r\nall")
        writer.close()


async def test_wire_is_not_used_for_a_response_with_a_length() -> None:
    frees: list[bool] = []

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        found = wire.take(scope)
        assert found is not None
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        frees.append(found.is_free)
        await send({"type": "http.response.body", "body": b"0\r\n\r\n"})

    async with serving(app) as address:
        await body_of(address)
    assert frees == [False]


@pytest.mark.parametrize("leaves", [True, False])
async def test_wire_is_not_free_when_the_client_disconnected_or_does_not_read(leaves: bool) -> None:
    busy = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found = wire.take(scope)
        assert found is not None
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if leaves:
            while (await receive())["type"] != "http.disconnect":
                continue
        else:
            while found.is_free:
                found.write(b"x" * 65536)
        assert not found.is_free
        busy.set()

    async with serving(app) as address:
        _reader, writer = await asyncio.open_connection(*address)
        writer.write(HEAD)
        await _reader.readuntil(b"\r\n\r\n")
        if leaves:
            writer.transport.abort()
        else:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        await busy.wait()
        writer.transport.abort()


async def test_scope_of_another_server_has_no_wire() -> None:
    assert wire.take({"type": "http"}) is None
    assert wire.take({"type": "http", "extensions": {"http.response.trailers": {}}}) is None
