"""HTTP framing with any segments: an application gets every complete request with the headers of its head, each is
answered once and in order, and bytes that are not HTTP end the connection after the last answer.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uvicorn import Config
from uvicorn.server import ServerState

from headgate.shared.wire import WiredHttp

pytestmark = pytest.mark.unmeasured

BODIES = (b"", b"{}", b"{}\r\n\r\n", b"0\r\n\r\nPOST / HTTP/1.1\r\n\r\n", b"x" * 70_000)
HEADERS = ((b"host", b"here"), (b"authorization", b"Bearer of-the-head"))
TRAILERS = b"authorization: Bearer of-a-trailer\r\nhost: elsewhere\r\n"
MALFORMED = (
    b"NONSENSE\r\n\r\n",
    b"\x16\x03\x01",
    b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
    b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nnot hexadecimal\r\n",
)

Request = tuple[list[tuple[bytes, bytes]], bytes]


class Transport(asyncio.Transport):
    """A client that reads everything."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 80), "peername": ("127.0.0.1", 1)})
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        """The test feeds the protocol."""

    def resume_reading(self) -> None:
        """The test feeds the protocol."""


@st.composite
def _requests(draw: st.DrawFn) -> tuple[bytes, Request]:
    """The bytes of a request, and what an application must get from it."""
    body = draw(st.sampled_from(BODIES))
    headers = list(HEADERS)
    if draw(st.booleans()):
        headers.append((b"transfer-encoding", b"chunked"))
        trailers = draw(st.sampled_from((b"", TRAILERS)))
        sent = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (body,) if piece) + b"0\r\n%b\r\n" % trailers
    else:
        headers.append((b"content-length", b"%d" % len(body)))
        sent = body
    head = b"POST / HTTP/1.1\r\n" + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n"
    return head + sent, (headers, body)


@given(
    st.lists(_requests(), max_size=4),
    st.sampled_from((b"", *MALFORMED)),
    st.lists(st.floats(0, 1), max_size=5),
    st.integers(0, 3),
)
def test_complete_requests_are_answered_once_and_in_order(
    requests: list[tuple[bytes, Request]], malformed: bytes, cuts: list[float], turns: int
) -> None:
    seen: list[Request] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        seen.append((list(scope["headers"]), body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"%02d" % len(seen)})

    async def play() -> Transport:
        transport = Transport()
        config = Config(app, lifespan="off", log_config=None, ws="none")
        connection = WiredHttp(config, ServerState(), {}, asyncio.get_running_loop())
        connection.connection_made(transport)
        data = b"".join(sent for sent, _ in requests) + malformed
        edges = [0, *sorted(int(cut * len(data)) for cut in cuts), len(data)]
        for begin, end in itertools.pairwise(edges):
            if begin < end and not transport.is_closed:
                connection.data_received(data[begin:end])
            for _ in range(turns):
                await asyncio.sleep(0)
        for _ in range(40):
            await asyncio.sleep(0)
        was_closed = transport.is_closed
        connection.connection_lost(None)
        for _ in range(5):
            await asyncio.sleep(0)
        assert was_closed == bool(malformed)
        return transport

    transport = asyncio.run(play())
    assert seen == [request for _, request in requests]
    answers = [b"%02d" % (number + 1) for number in range(len(requests))]
    assert re.findall(rb"HTTP/1\.1 200 OK\r\n.*?\r\n\r\n(\d\d)", transport.written, re.DOTALL) == answers
    refusals = transport.written.count(b"HTTP/1.1 400 ")
    assert refusals <= 1
    if malformed and not requests:
        assert refusals == 1


async def test_request_with_a_malformed_body_is_answered_once_if_the_body_is_not_read() -> None:
    """The error is answered before the application runs."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    transport = Transport()
    config = Config(app, lifespan="off", log_config=None, ws="none")
    connection = WiredHttp(config, ServerState(), {}, asyncio.get_running_loop())
    connection.connection_made(transport)
    connection.data_received(MALFORMED[-1])
    for _ in range(10):
        await asyncio.sleep(0)
    assert re.findall(rb"HTTP/1\.1 (\d+)", transport.written) == [b"400"]
    connection.connection_lost(None)
