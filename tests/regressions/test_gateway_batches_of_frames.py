"""Frames that were here already were noted with the time at which somebody had last waited for one.

So what a slow client or a slow opening had taken counted as the tier's silence. Comments that came in one piece with
the first content, behind it, were lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.apis.openai.frames import Comment, Data, Endpoint
from gateway.errors import UpstreamError
from gateway.providers.local.local_stream import LocalStream
from gateway.providers.provider import Call
from gateway.routing.attempt import Attempt
from gateway.routing.budget import Budget, Limits
from gateway.routing.stream_reader import ExpiredError, StreamReader
from tests.rigs import virtual_time
from tests.rigs.typed_bodies import call as typed_call

CALL = typed_call(Endpoint.CHAT, "demo", {}, "id")
WORD = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":null}]}\n\n'
ROLE = b'data: {"choices":[{"delta":{"role":"assistant"},"finish_reason":null}]}\n\n'
PING = b": keep-alive\n\n"
PROGRESS = b": headgate prefill 1/2\n\n"
FIRST_TOKEN, INTER_TOKEN = 10.0, 30.0


class Heard:
    """An answer of the service whose pieces come when the test says."""

    status = 200
    headers = {"content-type": "text/event-stream"}  # noqa: RUF012  # as an answer has them

    def __init__(self, *first: bytes) -> None:
        self._first = first

    def listen(self, on_piece: Callable[[bytes], None], on_end: Callable[[Any], None]) -> None:
        """Begins with what came with the head."""
        self.comes, self.ends = on_piece, on_end
        for piece in self._first:
            on_piece(piece)

    def pause(self) -> None:
        """Nothing is read ahead of the test."""

    def resume(self) -> None:
        """The same."""

    def close(self, linger_seconds: float = 0.0) -> None:
        """Nothing to close."""


def listening(
    answer: Heard, *, opens_after: float = 0.0, last: bool = True, silence: float | None = None
) -> StreamReader:
    async def ask(_call: Call, _body: bytes) -> Heard:
        await asyncio.sleep(opens_after)
        return answer

    provider = SimpleNamespace(name="local", stream=lambda call: LocalStream(ask, call, b""))  # type: ignore[arg-type]
    budget = Budget(Limits(FIRST_TOKEN, INTER_TOKEN, 1e6, 1e6, 3, silence), asyncio.get_running_loop().time())
    return StreamReader(provider, CALL, budget, last=last)  # type: ignore[arg-type]


async def silence_of(stream: StreamReader) -> float:
    """Seconds from now until the tier is left."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(ExpiredError):
        while True:
            stream.ready() or await stream.next()
    await stream.close()
    return round(loop.time() - began, 3)


def test_a_keep_alive_that_came_while_the_client_did_not_read_begins_the_silence_when_it_is_seen() -> None:
    async def run() -> float:
        answer = Heard(WORD)
        stream = listening(answer)
        await stream.open()
        assert len(stream.ready()) == 1
        await asyncio.sleep(25)
        answer.comes(PING)
        await asyncio.sleep(1)
        assert len(stream.ready()) == 1
        return await silence_of(stream)

    assert virtual_time.run(run()) == INTER_TOKEN


def test_what_the_opening_took_is_not_silence_behind_the_first_frame() -> None:
    """The caller waits a second: half of it for a tier that is not the last."""

    async def run() -> float:
        stream = listening(Heard(ROLE), opens_after=0.4, last=False, silence=1.0)
        await stream.open()
        return await silence_of(stream)

    assert virtual_time.run(run()) == 0.5


async def test_comments_behind_the_first_content_are_kept() -> None:
    attempt = Attempt.__new__(Attempt)
    attempt.last, attempt.backlog = True, []
    attempt._begun = True
    attempt._lease = SimpleNamespace(first_byte=lambda _: None)  # type: ignore[assignment]
    attempt._state = SimpleNamespace(context=SimpleNamespace(silence_seconds=None), began=1e12)  # type: ignore[assignment]
    attempt.reader = listening(Heard(PING + ROLE + PROGRESS + WORD + PROGRESS + WORD))
    await attempt.open(forward_comments=True)
    assert [type(frame) for frame in attempt.backlog] == [Data, Data, Comment, Data], "what was before is not forwarded"
    await attempt.reader.close()


async def test_an_error_that_comes_alone_is_told_while_the_connection_stays_open() -> None:
    answer = Heard()
    stream = listening(answer)
    await stream.open()
    waiting = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    answer.comes(b"data: oops\n\n")
    with pytest.raises(UpstreamError, match="oops"):
        await asyncio.wait_for(waiting, 5)
    await stream.close()
