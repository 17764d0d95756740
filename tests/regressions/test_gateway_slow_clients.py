"""Slow clients and clients that disconnect do not keep slots, connections or models busy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvloop

from gateway.gateway_server import OWN_DESCRIPTORS, _bounded_protocol
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
    """A client; a narrow one has a small receive buffer."""
    where = urlsplit(gateway.url)
    client = socket.socket()
    if narrow:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((where.hostname, where.port))
    return client


def _connections(gateway: Gateway) -> set[object]:
    return gateway._server.server_state.connections  # type: ignore[return-value]


class _Narrow(BoundedHttp):
    """The send buffer is small, so that unread data is detected early."""

    unread_seconds = 0.3

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        super().connection_made(transport)


class _Patient(_Narrow):
    unread_seconds = 30.0


class _LimitedTotal(_Narrow):
    unread_seconds = 30.0
    held_up_seconds = 0.4


class _Few(BoundedHttp):
    max_connections = 3


# --- readers ----------------------------------------------------------------------------------------------------------
async def test_unread_answer_within_the_read_ahead_limit_frees_its_model(tmp_path: Path, fake: FakeInference) -> None:
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
async def test_connection_with_unread_complete_answer_is_dropped(
    tmp_path: Path, fake: FakeInference, close: bool
) -> None:
    fake.answers["demo"] = Answer(words=(WORD,) * 24)
    async with Gateway(tmp_path, fake.url, http=_Narrow) as gateway:
        with _connect(gateway, narrow=True) as client:
            client.sendall(_request(close=close))
            await until("the answer began", lambda: fake.seen)
            await until("the connection is dropped", lambda: not _connections(gateway))
            assert fake.seen[0].ended.is_set()


async def test_slow_reader_is_disconnected_after_its_total_limit(tmp_path: Path, fake: FakeInference) -> None:
    """Each read is large enough not to count as stalled."""
    fake.answers["demo"] = Answer(words=(WORD,) * 4000)
    async with Gateway(tmp_path, fake.url, http=_LimitedTotal) as gateway:
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


async def test_pipelined_answer_behind_an_unread_one_has_a_limit_too(tmp_path: Path, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(stall=True)
    for number in range(3000):
        fake.models[f"model-{number}"] = ModelStatus(id=f"model-{number}", state=ModelState.READY)
    async with Gateway(tmp_path, fake.url, http=_LimitedTotal) as gateway:
        await gateway.look()
        with _connect(gateway, narrow=True) as client:
            client.sendall(_request("models", none=0).replace(b"POST", b"GET") + _request())
            await until("the stream was requested", lambda: fake.seen)
            async with asyncio.timeout(10):
                await fake.seen[0].closed.wait()
            await until("its place is free", lambda: gateway.runtime.admission.in_flight == 0)


# --- connections ------------------------------------------------------------------------------------------------------
async def test_longest_idle_connection_is_closed_at_the_limit(tmp_path: Path, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(stall=True)
    async with Gateway(tmp_path, fake.url, http=_Few) as gateway:
        busy = _connect(gateway)
        busy.sendall(_request())
        await until("one is busy", lambda: fake.seen)
        idle = []
        for count in (2, 3):
            idle.append(_connect(gateway))
            await until("it is accepted", lambda count=count: len(_connections(gateway)) == count)
        assert (await gateway.client.get("/livez")).status_code == 200
        await until("one idle connection is closed", lambda: len(_connections(gateway)) == 3)
        idle[0].settimeout(5)
        assert await asyncio.to_thread(idle[0].recv, 1) == b""
        idle[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            idle[1].recv(1)
        assert gateway.runtime.admission.in_flight == 1
        for client in (*idle, busy):
            client.close()


async def test_connection_beyond_the_limit_gets_429_when_all_are_busy(tmp_path: Path, fake: FakeInference) -> None:
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


def test_connection_limit_leaves_descriptors_for_upstream_connections() -> None:
    assert _bounded_protocol(1024).max_connections == (1024 - OWN_DESCRIPTORS) // 2
    assert _bounded_protocol(10).max_connections == 1
    assert _bounded_protocol(10**6).max_connections == MAX_CONNECTIONS


# --- what is sent -----------------------------------------------------------------------------------------------------
async def test_too_many_pipelined_requests_close_the_connection(tmp_path: Path, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(stall=True)
    async with Gateway(tmp_path, fake.url) as gateway:
        with _connect(gateway) as client:
            client.sendall(_request())
            await until("the first is served", lambda: fake.seen)
            client.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
            await until("the connection is gone", lambda: not _connections(gateway))
            await until("its place is free", lambda: gateway.runtime.admission.in_flight == 0)


async def test_invalid_bytes_do_not_interrupt_a_running_answer(tmp_path: Path, fake: FakeInference) -> None:
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
    ("headers", "limit"),
    [("".join(f"x-{n}: 1\r\n" for n in range(200)), "128 headers"), (f"x-a: {'y' * 70_000}\r\n", "65536 bytes")],
    ids=["many", "long"],
)
async def test_head_beyond_its_limits_is_431(gateway_url: str, headers: str, limit: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway_url.rpartition(":")[2]))
    writer.write(f"GET /livez HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n".encode())
    async with asyncio.timeout(5):
        answer = (await reader.read()).decode()
    writer.close()
    assert answer.startswith("HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert '"headers_too_large"' in answer
    assert limit in answer
    assert "x-request-id: req_" in answer


@pytest.fixture
async def gateway_url(tmp_path: Path, fake: FakeInference) -> AsyncIterator[str]:
    async with Gateway(tmp_path, fake.url) as gateway:
        yield gateway.url


class _Impatient(BoundedHttp):
    unread_seconds = 0.3


async def test_client_that_never_reads_is_disconnected_without_a_failure(tmp_path: Path, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(words=("x" * 65536,) * 400)
    async with Gateway(tmp_path, fake.url, http=_Impatient) as gateway:
        with _connect(gateway, narrow=True) as client:
            client.sendall(_request())
            await until("the answer began", lambda: fake.seen)
            await until("its slot is free", lambda: gateway.runtime.admission.in_flight == 0)
            async with asyncio.timeout(10):
                await fake.seen[0].closed.wait()
        assert (await gateway.breaker("local/demo"))["failures"] == 0


async def test_slow_reader_within_the_limits_gets_the_whole_answer(tmp_path: Path, fake: FakeInference) -> None:
    word = "x" * 65536
    fake.answers["demo"] = Answer(words=(word,) * 60)
    body = {"model": "demo", "messages": MESSAGES, "stream": True}
    async with (
        Gateway(tmp_path, fake.url, http=_Impatient) as gateway,
        gateway.client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        seen = b""
        async for piece in response.aiter_raw():
            seen += piece
            await asyncio.sleep(0.002)
    assert seen.count(word.encode()) == 60
    assert seen.endswith(b"data: [DONE]\n\n")


async def _disconnect_with_a_pipelined_request(root: Path, *, stream: bool) -> None:
    request = _request(model="demo", messages=MESSAGES, stream=stream)
    async with FakeInference("token") as fake:
        fake.answers["demo"] = Answer(words=("word",) * 4000, pause=0.01)
        async with Gateway(root, fake.url) as gateway:
            client = _connect(gateway)
            client.sendall(request)
            await until("the first answer began", lambda: fake.seen)
            client.sendall(request)
            connections = gateway._server.server_state.connections
            await until("the second request waits", lambda: any(one.pipeline for one in connections))  # type: ignore[union-attr]
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            async with asyncio.timeout(10):
                await fake.seen[0].closed.wait()
            await until("its slot is free", lambda: gateway.runtime.admission.in_flight == 0)
            assert (await gateway.breaker("local/demo"))["failures"] == 0
            assert len(fake.seen) == 1


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_disconnect_with_a_pipelined_request_cancels_without_a_failure(
    tmp_path: Path, loop: object, stream: bool
) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:  # type: ignore[arg-type]
        runner.run(_disconnect_with_a_pipelined_request(tmp_path, stream=stream))
