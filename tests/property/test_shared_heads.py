"""A request whose head is known says to the application what the parser would have said, wherever the bytes are cut."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from headgate.shared import wire
from headgate.shared.heads import MAX_BYTES, learn
from headgate.shared.wire import WiredHttp

pytestmark = pytest.mark.unmeasured

KEY = b"authorization: Bearer hg-1\r\n"
LINES = (
    b"POST /v1/a?b=c HTTP/1.1\r\nHost: here\r\n" + KEY,
    b"POST /v1/a?b=c HTTP/1.1\r\nHost: here\r\nauthorization: Bearer hg-2\r\n",
    b"POST /v1/%61 HTTP/1.1\r\nX-Empty:\r\nX-Spaces: \t a  b \r\n",
    b"POST / HTTP/1.1\r\nconnection: close\r\n",
    b"POST / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n",
    b"POST / HTTP/1.1\r\nexpect: 100-continue\r\n",
    b"POST / HTTP/1.0\r\n",
    b"PUT / HTTP/1.1\r\n",
    b"\r\nPOST / HTTP/1.1\r\n",
    b"POST  / HTTP/1.1\r\n",
    b"POST / HTTP/1.1\r\nx: a\r\n folded\r\n",
    b"POST / HTTP/1.1\nx: a\n",
    b"POST / HTTP/1.1\r\nx: " + b"a" * MAX_BYTES + b"\r\n",
)
LENGTHS = (b"Content-Length: %d\r\n", b"content-length:00%d\r\nX-After: 1\r\n", b"content-length: %d \r\n")
BODIES = (b"", b"{}", b"{}\r\n\r\n", b"content-length: 2\r\n\r\n{}", b"x" * 70000)
CHUNKED = b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"


class Transport(asyncio.Transport):
    """What is written to a client that reads everything."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 80), "peername": ("127.0.0.1", 1)})
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        """It is fed by the test."""

    def resume_reading(self) -> None:
        """As above."""


class Told:
    """What an application is told, once it has read every body to its end."""

    def __init__(self, at_once: bool = False) -> None:
        self.requests: list[tuple[Any, bytes]] = []
        self.known = 0
        self._at_once = at_once

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        found = wire.take(scope)
        self.known += found is not None and found.head is not None
        body, more = b"", not self._at_once
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        told = {name: said for name, said in scope.items() if name != "extensions"}
        self.requests.append((told, body))
        scope["state"]["seen"] = scope["path"] = "changed"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


async def told(kind: type[HttpToolsProtocol], pieces: list[bytes], at_once: bool = False) -> tuple[Told, Transport]:
    """The application and the client behind a connection that these bytes come through."""
    app, transport = Told(at_once), Transport()
    config = Config(app, lifespan="off", log_config=None, ws="none")
    connection = kind(config, ServerState(), {"kept": 1}, asyncio.get_running_loop())
    connection.connection_made(transport)
    for piece in pieces:
        if not transport.is_closed:
            connection.data_received(piece)
        for _ in range(8):
            await asyncio.sleep(0)
    connection.connection_lost(None)
    for _ in range(8):
        await asyncio.sleep(0)
    return app, transport


@st.composite
def _requests(draw: st.DrawFn) -> bytes:
    line = draw(st.sampled_from(LINES[:3]) | st.sampled_from(LINES))
    if draw(st.integers(0, 9)) == 0:
        return line + CHUNKED
    body = draw(st.sampled_from(BODIES))
    return line + draw(st.sampled_from(LENGTHS)) % len(body) + b"\r\n" + body


@st.composite
def _pieces(draw: st.DrawFn) -> list[bytes]:
    """Requests of few kinds, most of them whole, some cut anywhere and some run into the next."""
    kinds = draw(st.lists(_requests(), min_size=1, max_size=3))
    pieces = [b""]
    for request in draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=6)):
        head = request.find(b"\r\n\r\n") + 4
        cuts = draw(st.just([]) | st.just([head]) | st.lists(st.integers(0, len(request)), max_size=3))
        edges = [0, *sorted(cuts), len(request)]
        parts = [request[begin:end] for begin, end in itertools.pairwise(edges)]
        if draw(st.integers(0, 5)) == 0:
            pieces[-1] += parts.pop(0)
        pieces += parts
    return [piece for piece in pieces if piece]


@given(_pieces(), st.booleans())
def test_what_is_told_is_what_the_parser_tells(pieces: list[bytes], at_once: bool) -> None:
    """`at_once`: an application that answers before it has read the body."""

    async def compare() -> None:
        ours, client = await told(WiredHttp, pieces, at_once)
        theirs, other = await told(HttpToolsProtocol, pieces, at_once)
        assert ours.requests == theirs.requests
        assert (client.written, client.is_closed) == (other.written, other.is_closed)

    asyncio.run(compare())


def _request(line: bytes, body: bytes, length: bytes = LENGTHS[0]) -> bytes:
    return line + length % len(body) + b"\r\n" + body


@pytest.mark.parametrize("cut", [None, 0, 1])
async def test_the_same_head_is_known_whatever_the_length(cut: int | None) -> None:
    """Whole, with the head alone at first, and cut within the body."""
    pieces = []
    for body in (b"{}", b"{}", b"", b'{"a": 1}', b"x" * 70000):
        request = _request(LINES[0], body)
        edge = len(request) if cut is None else request.index(b"\r\n\r\n") + 4 + cut
        pieces += [piece for piece in (request[:edge], request[edge:]) if piece]
    app, _ = await told(WiredHttp, pieces)
    assert [len(body) for _, body in app.requests] == [2, 2, 0, 8, 70000]
    assert app.known == 4


async def test_a_head_is_forgotten_with_the_next_that_is_parsed() -> None:
    """Two keys that take turns are never known; and a connection where nothing is ever known again stops to look."""
    ones, others = _request(LINES[0], b"{}"), _request(LINES[1], b"{}")
    app, _ = await told(WiredHttp, [ones, others] * 4 + [others] * 3)
    assert app.known == 0
    assert [dict(scope["headers"])[b"authorization"][-1:] for scope, _ in app.requests[:3]] == [b"1", b"2", b"1"]
    app, _ = await told(WiredHttp, [ones, others, others, ones, ones, ones])
    assert app.known == 3


@pytest.mark.parametrize("line", LINES[3:8] + LINES[12:])
async def test_a_head_that_is_more_than_a_question_is_parsed(line: bytes) -> None:
    app, _ = await told(WiredHttp, [_request(line, b"{}")] * 3)
    assert app.known == 0
    assert app.requests


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /b HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: there\r\ncontent-length: 2\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\nmore: 1\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\n",
        b"\r\nPOST /a HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\n\r\n",
        b"POST /a HTTP/1.1\nhost: here\ncontent-length: 2\n\nand\r\n\r\n",
    ],
)
def test_bytes_that_are_not_what_was_parsed_are_not_learned(raw: bytes) -> None:
    scope = dict.fromkeys(("type", "asgi", "server", "client", "scheme", "root_path", "path", "raw_path"), "")
    headers = [(b"host", b"here"), (b"content-length", b"2")]
    scope |= {"method": "POST", "http_version": "1.1", "query_string": b"", "headers": headers}  # type: ignore[dict-item]
    good = b"POST /a HTTP/1.1\r\nHost: here\r\nContent-Length:2\r\n\r\n"
    assert learn(raw, scope, b"/a") is None
    head = learn(good, scope, b"/a")
    assert head is not None
    assert head.rest(good + b"ab") == (b"2", b"ab")
    assert head.rest(good.replace(b"2", b"0012") + b"ab") == (b"0012", b"ab")
    for digits in (b"", b"3 ", b"-2", b"+2", b"0x2", b"2\r\nmore: 1", b"1" * 11, "\u0662".encode()):
        assert head.rest(good.replace(b"2", digits) + b"ab") is None
    assert head.rest(good + b"abc") is None, "more than the body"
    assert head.rest(good[:-1]) is None, "a part of the head"
    other = head.scope()
    head.set_length(other["headers"], b"7")
    assert other["headers"] == [(b"host", b"here"), (b"content-length", b"7")]
    assert head.scope()["headers"] == headers
