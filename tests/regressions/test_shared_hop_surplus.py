"""What a service sent behind a whole answer was taken for more of it, and one that changed protocols broke the parser
in the loop's hands.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate.shared import hop
from headgate.shared.hop import BrokenError, Hop

pytestmark = pytest.mark.timeout(20)

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def _asked_twice(said: bytes) -> tuple[list[Any], int, list[dict[str, Any]]]:
    """Two answers of a service that says `said`, or how they broke; how many connections they took; what the loop had
    to say.
    """
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    served: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(said)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    asks = Hop(hop.tcp("127.0.0.1", server.sockets[0].getsockname()[1]), "here", idle_seconds=60.0)
    answers: list[Any] = []
    for _ in range(2):
        try:
            answer = await asks.post("/", b"", {})
        except BrokenError as error:
            answers.append(error)
            continue
        answers.append((answer.status, answer.headers, await answer.whole()))
        answer.close()
    asks.close()
    server.close()
    await asyncio.gather(*(task for task in served if task is not None))
    await server.wait_closed()
    return answers, len(served), complaints


@pytest.mark.parametrize(
    "surplus", [b"HTTP/1.1 200 OK\r\nx: y\r\ncontent-length: 4\r\n\r\nmore", b"junk"], ids=["an answer", "junk"]
)
async def test_nothing_behind_an_answer_belongs_to_it_and_its_connection_serves_no_other(surplus: bytes) -> None:
    answers, connections, complaints = await _asked_twice(OK + surplus)
    assert answers == [(200, {"content-length": "2"}, b"ok")] * 2
    assert connections == 2
    assert complaints == []


async def test_another_protocol_is_a_broken_answer() -> None:
    answers, _, complaints = await _asked_twice(
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nx"
    )
    assert all(isinstance(answer, BrokenError) and "not HTTP" in str(answer) for answer in answers)
    assert complaints == []
