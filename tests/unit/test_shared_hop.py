"""HTTP client of the local hop: pieces, ends and interruptions of answers, and reuse of connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from headgate.shared import hop
from headgate.shared.hop import MAX_HEAD_BYTES, Answer, BrokenError, Hop

pytestmark = pytest.mark.timeout(20)

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Scripted:
    """A server that sends the same response to each request, records them, and with `then_closes` then disconnects."""

    answer: bytes
    then_closes: bool = False
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0
    writer: asyncio.StreamWriter | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        self.connections += 1
        self.writer = writer
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
                self.requests.append(head + await reader.readexactly(int(length.split()[1])))
                writer.write(self.answer)
                await writer.drain()
                if self.then_closes:
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self.closed.set()

    @contextlib.asynccontextmanager
    async def serving(self, idle_seconds: float = 0.0) -> AsyncIterator[Hop]:
        """Serve, and yield a client."""
        server = await asyncio.start_server(self._serve, "127.0.0.1")
        self.port = server.sockets[0].getsockname()[1]
        client = Hop(hop.tcp("127.0.0.1", self.port), "here", idle_seconds)
        try:
            yield client
        finally:
            client.close()
            server.close()
            await asyncio.gather(*self.tasks)
            await server.wait_closed()


class Listener:
    """Records pieces and the end of an answer."""

    def __init__(self, answer: Answer) -> None:
        self.pieces: list[bytes] = []
        self.end: asyncio.Future[BrokenError | None] = asyncio.get_running_loop().create_future()
        self.more = asyncio.Event()
        answer.listen(self._on_piece, self.end.set_result)

    def _on_piece(self, piece: bytes) -> None:
        self.pieces.append(piece)
        self.more.set()


async def test_pieces_arrive_as_they_are_written() -> None:
    server = Scripted(CHUNKED + b"3\r\none\r\n")
    async with server.serving() as client:
        answer = await client.post("/v1/x", b"{}", {"x-request-id": "7"})
        assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
        received = Listener(answer)
        await received.more.wait()
        assert received.pieces == [b"one"]
        assert server.writer is not None
        server.writer.write(b"3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n")
        assert await received.end is None
        assert b"".join(received.pieces) == b"onetwothree"
        answer.close()
        await server.closed.wait()
    assert server.requests[0].startswith(
        b"POST /v1/x HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\nx-request-id: 7\r\n"
    )
    assert server.requests[0].endswith(b"connection: close\r\n\r\n{}")


async def test_chunks_of_one_read_are_one_piece() -> None:
    async with Scripted(CHUNKED + b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n").serving() as client:
        received = Listener(answer := await client.post("/", b"", {}))
        assert await received.end is None
        assert received.pieces == [b"onetwo"]
        answer.close()


async def test_connection_is_reused_after_a_complete_answer_only() -> None:
    server = Scripted(OK + b"content-length: 5\r\n\r\nwhole")
    async with server.serving(idle_seconds=60.0) as client:
        for _ in range(3):
            answer = await client.post("/", b"", {})
            assert await answer.whole() == b"whole"
            answer.close()
        assert server.connections == 1
        server.answer = CHUNKED + b"3\r\none\r\n"
        answer = await client.post("/", b"", {})
        assert await answer.whole(max_bytes=2) == b"one"
        answer.close()
        await server.closed.wait()
        server.answer = OK + b"content-length: 0\r\n\r\n"
        answer = await client.post("/", b"", {})
        assert await answer.whole() == b""
        answer.close()
        assert server.connections == 2


async def test_idle_connections_close_without_another_request() -> None:
    server = Scripted(OK + b"content-length: 2\r\n\r\nok")
    async with server.serving(idle_seconds=0.05) as client:
        answers = [await client.post("/", b"", {}) for _ in range(3)]
        for answer in answers:
            assert await answer.whole() == b"ok"
            answer.close()
        assert server.connections == 3
        async with asyncio.timeout(5):
            await asyncio.gather(*server.tasks)
        answer = await client.post("/", b"", {})
        assert await answer.whole() == b"ok"
        answer.close()
        assert server.connections == 4


async def test_closed_connection_is_not_reused() -> None:
    server = Scripted(OK + b"content-length: 2\r\n\r\nok")
    async with server.serving(idle_seconds=60.0) as client:
        answer = await client.post("/", b"", {})
        await answer.whole()
        answer.close()
        assert server.writer is not None
        server.writer.close()
        await server.closed.wait()
        answer = await client.post("/", b"", {})
        assert await answer.whole() == b"ok"
        client.close()
        answer.close()
        server.closed.clear()
        await server.closed.wait()
    assert server.connections == 2


@pytest.mark.parametrize(
    ("response", "whole"),
    [
        (OK + b"\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.0 200 OK\r\n\r\nold", b"old"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
    ids=["without a length", "after an interim answer", "http 1.0", "nothing"],
)
async def test_end_of_each_kind_of_body_is_detected(response: bytes, whole: bytes) -> None:
    async with Scripted(response, then_closes=True).serving() as client:
        answer = await client.post("/", b"", {})
        assert await answer.whole() == whole
        answer.close()


@pytest.mark.parametrize(
    "response",
    [CHUNKED + b"3\r\none\r\n", CHUNKED + b"3\r\non", OK + b"content-length: 9\r\n\r\nshort"],
    ids=["between chunks", "within a chunk", "within a length"],
)
async def test_interrupted_answer_delivers_its_pieces_and_then_an_error(response: bytes) -> None:
    async with Scripted(response, then_closes=True).serving() as client:
        answer = await client.post("/", b"", {})
        received = Listener(answer)
        assert isinstance(await received.end, BrokenError)
        assert b"".join(received.pieces) in (b"one", b"on", b"short")
        answer.close()
        other = await client.post("/", b"", {})
        with pytest.raises(BrokenError, match="closed"):
            await other.whole()
        other.close()


@pytest.mark.parametrize(
    "response",
    [b"", OK, b"hello, is this HTTP?\r\n\r\n", OK + b"x: " + b"y" * 2 * MAX_HEAD_BYTES],
    ids=["nothing", "half a head", "no http", "endless head"],
)
async def test_invalid_head_is_an_error(response: bytes) -> None:
    async with Scripted(response, then_closes=True).serving() as client:
        with pytest.raises(BrokenError):
            await client.post("/", b"", {})


async def test_refused_connection_is_an_os_error() -> None:
    server = Scripted(b"")
    async with server.serving() as client:
        pass
    with pytest.raises(OSError, match=r"refused|Connect"):
        await client.post("/", b"", {}, connect_seconds=5.0)


async def test_paused_answer_delivers_no_pieces() -> None:
    server = Scripted(CHUNKED)
    async with server.serving() as client:
        answer = await client.post("/", b"", {})
        received = Listener(answer)
        answer.pause()
        assert server.writer is not None
        server.writer.write(b"100000\r\n" + b"x" * 2**20 + b"\r\n0\r\n\r\n")
        for _ in range(20):
            await asyncio.sleep(0)
        assert received.pieces == []
        answer.resume()
        assert await received.end is None
        assert sum(map(len, received.pieces)) == 2**20
        answer.close()


@pytest.mark.parametrize("idle_seconds", [0.0, 60.0])
@pytest.mark.parametrize("value", ["a\r\nauthorization: b", "a\n", "a\r"])
async def test_line_break_in_a_header_is_rejected(idle_seconds: float, value: str) -> None:
    async with Scripted(b"").serving(idle_seconds) as client:
        with pytest.raises(ValueError, match="line break"):
            await client.post("/", b"", {"x-request-id": value, "x-other": "c"})


async def test_request_is_written_as_http_1_1() -> None:
    server = Scripted(OK + b"content-length: 0\r\n\r\n")
    for idle_seconds in (0.0, 60.0):
        async with server.serving(idle_seconds) as client:
            (await client.post("/v1/x", b"{}", {"a": "1", "b": "2"})).close()
    begin = b"POST /v1/x HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\na: 1\r\nb: 2\r\n"
    assert server.requests == [begin + b"connection: close\r\n\r\n{}", begin + b"\r\n{}"]
