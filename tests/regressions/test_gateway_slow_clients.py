"""Clients that read, send or leave slowly once held more than their share: a model's slot, a place, the port itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from gateway.gateway_server import OWN_DESCRIPTORS, _bounded_by
from gateway.http.connection_limits import MAX_CONNECTIONS, BoundedHttp
from inference.protocol import ModelState, ModelStatus
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import KEY, MESSAGES, Gateway
from tests.rigs.stack import until

WORD = "x" * 16384


def _request(path: str = "chat/completions", *, close: bool = False, **body: object) -> bytes:
    raw = json.dumps(body or {"model": "demo", "messages": MESSAGES, "stream": True}).encode()
    return (
        f"POST /v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        f"{'Connection: close' if close else 'X-A: b'}\r\nContent-Length: {len(raw)}\r\n\r\n"
    ).encode() + raw


def _connect(gateway: Gateway, *, narrow: bool = False) -> socket.socket:
    """A client; a narrow one lets the kernel hold little for it."""
    where = urlsplit(gateway.url)
    client = socket.socket()
    if narrow:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((where.hostname, where.port))
    return client


def _connections(gateway: Gateway) -> set[object]:
    return gateway._server.server_state.connections  # type: ignore[return-value]


class _Narrow(BoundedHttp):
    """The kernel holds little for its clients either, so that what is unread is seen."""

    unread_seconds = 0.3

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        super().connection_made(transport)


class _Patient(_Narrow):
    unread_seconds = 30.0


class _HeldUp(_Narrow):
    unread_seconds = 30.0
    held_up_seconds = 0.4


class _Few(BoundedHttp):
    most_connections = 3


# --- readers ----------------------------------------------------------------------------------------------------------
async def test_an_answer_ends_though_nobody_reads_it_yet(tmp_path: Path, fake: FakeInference) -> None:
    """Up to the bytes that are read ahead the model goes at its own speed, and its slot is free at the answer's end."""
    fake.answers["demo"] = Answer(words=(WORD,) * 24)
    async with Gateway(tmp_path, fake.url, http=_Patient) as gateway:
        with _connect(gateway, narrow=True) as client:
            client.sendall(_request())
            await until("the answer began", lambda: fake.seen)
            async with asyncio.timeout(10):
                await fake.seen[0].ended.wait()
            await until("its place is free", lambda: gateway.runtime.admission.in_flight == 0)
            assert not fake.seen[0].closed.is_set()
            assert len(_connections(gateway)) == 1


@pytest.mark.parametrize("close", [False, True], ids=["kept", "closing"])
async def test_what_nobody_reads_after_its_end_is_given_up(tmp_path: Path, fake: FakeInference, close: bool) -> None:
    fake.answers["demo"] = Answer(words=(WORD,) * 24)
    async with Gateway(tmp_path, fake.url, http=_Narrow) as gateway:
        with _connect(gateway, narrow=True) as client:
            client.sendall(_request(close=close))
            await until("the answer began", lambda: fake.seen)
            await until("the connection is dropped", lambda: not _connections(gateway))
            assert fake.seen[0].ended.is_set()


async def test_a_reader_may_hold_an_answer_up_for_so_long_in_all(tmp_path: Path, fake: FakeInference) -> None:
    """It reads enough each time not to count as gone, and is cut off all the same."""
    fake.answers["demo"] = Answer(words=(WORD,) * 4000)
    async with Gateway(tmp_path, fake.url, http=_HeldUp) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]), limit=4096)
        writer.write(_request())
        size = 0
        with contextlib.suppress(ConnectionResetError):
            while piece := await reader.read(16384):
                size += len(piece)
                await asyncio.sleep(0.01)
        assert 100_000 < size < 4000 * len(WORD)
        await until("its place is free", lambda: gateway.runtime.admission.in_flight == 0)
        async with asyncio.timeout(10):
            await fake.seen[0].closed.wait()
        assert (await gateway.breaker("local/demo"))["failures"] == 0
        writer.close()


async def test_an_answer_behind_one_that_is_not_read_has_its_end_too(tmp_path: Path, fake: FakeInference) -> None:
    """The list of models is written and unread; the stream behind it could not be written at all, and held its slot."""
    fake.answers["demo"] = Answer(stall=True)
    for number in range(3000):
        fake.models[f"model-{number}"] = ModelStatus(id=f"model-{number}", state=ModelState.READY)
    async with Gateway(tmp_path, fake.url, http=_HeldUp) as gateway:
        await gateway.look()
        with _connect(gateway, narrow=True) as client:
            client.sendall(_request("models", none=0).replace(b"POST", b"GET") + _request())
            await until("the stream was asked for", lambda: fake.seen)
            async with asyncio.timeout(10):
                await fake.seen[0].closed.wait()
            await until("its place is free", lambda: gateway.runtime.admission.in_flight == 0)


# --- connections ------------------------------------------------------------------------------------------------------
async def test_the_connection_that_idled_longest_makes_room(tmp_path: Path, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(stall=True)
    async with Gateway(tmp_path, fake.url, http=_Few) as gateway:
        busy = _connect(gateway)
        busy.sendall(_request())
        await until("one is busy", lambda: fake.seen)
        idle = [_connect(gateway) for _ in range(2)]
        await until("all are there", lambda: len(_connections(gateway)) == 3)
        assert (await gateway.client.get("/livez")).status_code == 200
        await until("one idle one left", lambda: len(_connections(gateway)) == 3)
        assert gateway.runtime.admission.in_flight == 1
        for client in (*idle, busy):
            client.close()


async def test_when_every_connection_is_busy_the_next_is_told_so(tmp_path: Path, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(stall=True)
    async with Gateway(tmp_path, fake.url, http=_Few) as gateway:
        busy = [_connect(gateway) for _ in range(3)]
        for client in busy:
            client.sendall(_request())
        await until("all are busy", lambda: len(fake.seen) == 3)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        async with asyncio.timeout(5):
            answer = (await reader.read()).decode()
        assert answer.startswith("HTTP/1.1 429 Too Many Requests\r\n")
        assert "retry-after: 1\r\n" in answer
        assert '"queue_full"' in answer
        writer.close()
        for client in busy:
            client.close()


def test_there_are_descriptors_for_every_connection_and_its_tier() -> None:
    assert _bounded_by(1024).most_connections == (1024 - OWN_DESCRIPTORS) // 2
    assert _bounded_by(10).most_connections == 1
    assert _bounded_by(10**6).most_connections == MAX_CONNECTIONS


# --- what is sent -----------------------------------------------------------------------------------------------------
async def test_more_requests_behind_another_than_may_wait_end_the_connection(
    tmp_path: Path, fake: FakeInference
) -> None:
    fake.answers["demo"] = Answer(stall=True)
    async with Gateway(tmp_path, fake.url) as gateway:
        with _connect(gateway) as client:
            client.sendall(_request())
            await until("the first is served", lambda: fake.seen)
            client.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
            await until("the connection is gone", lambda: not _connections(gateway))
            await until("its place is free", lambda: gateway.runtime.admission.in_flight == 0)


async def test_an_answer_under_way_is_completed_before_bytes_that_are_not_http_end_the_connection(
    tmp_path: Path, fake: FakeInference
) -> None:
    """The refusal was once written into the middle of the stream."""
    fake.answers["demo"] = Answer(words=("word",) * 20, pause=0.02)
    async with Gateway(tmp_path, fake.url) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        writer.write(_request())
        async with asyncio.timeout(10):
            seen = await reader.readuntil(b"word")
            writer.write(b"NONSENSE\r\n\r\n")
            seen += await reader.read()
        assert seen.count(b"HTTP/1.1") == 1
        assert b"invalid_request" not in seen
        assert seen.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()


@pytest.mark.parametrize(
    ("headers", "said"),
    [("".join(f"x-{n}: 1\r\n" for n in range(200)), "128 headers"), (f"x-a: {'y' * 70_000}\r\n", "65536 bytes")],
    ids=["many", "long"],
)
async def test_a_head_beyond_its_bounds_is_431(gateway_url: str, headers: str, said: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway_url.rpartition(":")[2]))
    writer.write(f"GET /livez HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n".encode())
    async with asyncio.timeout(5):
        answer = (await reader.read()).decode()
    writer.close()
    assert answer.startswith("HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert '"headers_too_large"' in answer
    assert said in answer
    assert "x-request-id: req_" in answer


@pytest.fixture
async def gateway_url(tmp_path: Path, fake: FakeInference) -> AsyncIterator[str]:
    async with Gateway(tmp_path, fake.url) as gateway:
        yield gateway.url
