"""Answers that are handed on as they arrive: pieces, their end, broken ones, and which connections are used again."""

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
    """A server that says the same bytes to every request; `then_closes` after them. `asked` are the requests' heads."""

    answer: bytes
    then_closes: bool = False
    asked: list[bytes] = field(default_factory=list)
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
                self.asked.append(head + await reader.readexactly(int(length.split()[1])))
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
        """Serves; gives what asks it."""
        server = await asyncio.start_server(self._serve, "127.0.0.1")
        self.port = server.sockets[0].getsockname()[1]
        asks = Hop(hop.tcp("127.0.0.1", self.port), "here", idle_seconds)
        try:
            yield asks
        finally:
            asks.close()
            server.close()
            await asyncio.gather(*self.tasks)
            await server.wait_closed()


class Listener:
    """What was handed on."""

    def __init__(self, answer: Answer) -> None:
        self.pieces: list[bytes] = []
        self.end: asyncio.Future[BrokenError | None] = asyncio.get_running_loop().create_future()
        self.more = asyncio.Event()
        answer.listen(self._on_piece, self.end.set_result)

    def _on_piece(self, piece: bytes) -> None:
        self.pieces.append(piece)
        self.more.set()


async def test_pieces_come_as_they_are_written_and_then_the_end() -> None:
    server = Scripted(CHUNKED + b"3\r\none\r\n")
    async with server.serving() as asks:
        answer = await asks.post("/v1/x", b"{}", {"x-request-id": "7"})
        assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
        heard = Listener(answer)
        await heard.more.wait()
        assert heard.pieces == [b"one"]
        assert server.writer is not None
        server.writer.write(b"3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n")
        assert await heard.end is None
        assert b"".join(heard.pieces) == b"onetwothree"
        answer.close()
        await server.closed.wait()
    assert server.asked[0].startswith(b"POST /v1/x HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\nx-request-id: 7\r\n")
    assert server.asked[0].endswith(b"connection: close\r\n\r\n{}")


async def test_what_came_together_is_one_piece() -> None:
    async with Scripted(CHUNKED + b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n").serving() as asks:
        heard = Listener(answer := await asks.post("/", b"", {}))
        assert await heard.end is None
        assert heard.pieces == [b"onetwo"]
        answer.close()


async def test_a_whole_answer_leaves_its_connection_for_the_next_and_one_cut_short_does_not() -> None:
    server = Scripted(OK + b"content-length: 5\r\n\r\nwhole")
    async with server.serving(idle_seconds=60.0) as asks:
        for _ in range(3):
            answer = await asks.post("/", b"", {})
            assert await answer.whole() == b"whole"
            answer.close()
        assert server.connections == 1
        server.answer = CHUNKED + b"3\r\none\r\n"
        answer = await asks.post("/", b"", {})
        assert await answer.whole(most_bytes=2) == b"one"
        answer.close()
        await server.closed.wait()
        server.answer = OK + b"content-length: 0\r\n\r\n"
        answer = await asks.post("/", b"", {})
        assert await answer.whole() == b""
        answer.close()
        assert server.connections == 2


async def test_idle_connections_close_without_another_request() -> None:
    server = Scripted(OK + b"content-length: 2\r\n\r\nok")
    async with server.serving(idle_seconds=0.05) as asks:
        answers = [await asks.post("/", b"", {}) for _ in range(3)]
        for answer in answers:
            assert await answer.whole() == b"ok"
            answer.close()
        assert server.connections == 3
        async with asyncio.timeout(5):
            await asyncio.gather(*server.tasks)
        answer = await asks.post("/", b"", {})
        assert await answer.whole() == b"ok"
        answer.close()
        assert server.connections == 4


async def test_a_connection_that_was_closed_meanwhile_is_not_used_again() -> None:
    server = Scripted(OK + b"content-length: 2\r\n\r\nok")
    async with server.serving(idle_seconds=60.0) as asks:
        answer = await asks.post("/", b"", {})
        await answer.whole()
        answer.close()
        assert server.writer is not None
        server.writer.close()
        await server.closed.wait()
        answer = await asks.post("/", b"", {})
        assert await answer.whole() == b"ok"
        asks.close()
        answer.close()
        server.closed.clear()
        await server.closed.wait()
    assert server.connections == 2


@pytest.mark.parametrize(
    ("said", "whole"),
    [
        (OK + b"\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.0 200 OK\r\n\r\nold", b"old"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
    ids=["without a length", "after an interim answer", "http 1.0", "nothing"],
)
async def test_bodies_end_as_http_says(said: bytes, whole: bytes) -> None:
    async with Scripted(said, then_closes=True).serving() as asks:
        answer = await asks.post("/", b"", {})
        assert await answer.whole() == whole
        answer.close()


@pytest.mark.parametrize(
    "said",
    [CHUNKED + b"3\r\none\r\n", CHUNKED + b"3\r\non", OK + b"content-length: 9\r\n\r\nshort"],
    ids=["between chunks", "within a chunk", "within a length"],
)
async def test_an_answer_that_breaks_off_is_told_after_what_came(said: bytes) -> None:
    async with Scripted(said, then_closes=True).serving() as asks:
        answer = await asks.post("/", b"", {})
        heard = Listener(answer)
        assert isinstance(await heard.end, BrokenError)
        assert b"".join(heard.pieces) in (b"one", b"on", b"short")
        answer.close()
        other = await asks.post("/", b"", {})
        with pytest.raises(BrokenError, match="closed"):
            await other.whole()
        other.close()


@pytest.mark.parametrize(
    "said",
    [b"", OK, b"hello, who is there?\r\n\r\n", OK + b"x: " + b"y" * 2 * MAX_HEAD_BYTES],
    ids=["nothing", "half a head", "no http", "endless head"],
)
async def test_no_head_is_an_error(said: bytes) -> None:
    async with Scripted(said, then_closes=True).serving() as asks:
        with pytest.raises(BrokenError):
            await asks.post("/", b"", {})


async def test_nobody_there_is_an_os_error() -> None:
    server = Scripted(b"")
    async with server.serving() as asks:
        pass
    with pytest.raises(OSError, match=r"refused|Connect"):
        await asks.post("/", b"", {}, connect_seconds=5.0)


async def test_nothing_arrives_while_paused() -> None:
    """But for what is on its way already, which is not bounded by who pauses but by what a connection holds."""
    server = Scripted(CHUNKED)
    async with server.serving() as asks:
        answer = await asks.post("/", b"", {})
        heard = Listener(answer)
        answer.pause()
        assert server.writer is not None
        server.writer.write(b"100000\r\n" + b"x" * 2**20 + b"\r\n0\r\n\r\n")
        for _ in range(20):
            await asyncio.sleep(0)
        assert heard.pieces == []
        answer.resume()
        assert await heard.end is None
        assert sum(map(len, heard.pieces)) == 2**20
        answer.close()


@pytest.mark.parametrize("idle_seconds", [0.0, 60.0])
@pytest.mark.parametrize("value", ["a\r\nauthorization: b", "a\n", "a\r"])
async def test_a_header_cannot_smuggle_another(idle_seconds: float, value: str) -> None:
    async with Scripted(b"").serving(idle_seconds) as asks:
        with pytest.raises(ValueError, match="line break"):
            await asks.post("/", b"", {"x-request-id": value, "x-other": "c"})


async def test_a_head_is_these_bytes() -> None:
    server = Scripted(OK + b"content-length: 0\r\n\r\n")
    for idle_seconds in (0.0, 60.0):
        async with server.serving(idle_seconds) as asks:
            (await asks.post("/v1/x", b"{}", {"a": "1", "b": "2"})).close()
    begin = b"POST /v1/x HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\na: 1\r\nb: 2\r\n"
    assert server.asked == [begin + b"connection: close\r\n\r\n{}", begin + b"\r\n{}"]
