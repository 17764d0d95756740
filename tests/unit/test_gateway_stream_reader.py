"""Silence of a stream counts only while a task waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.apis.openai.frames import Comment, Data, DeltaKind, Endpoint, Frame
from gateway.providers.provider import Call
from gateway.routing.budget import Budget, Limits
from gateway.routing.stream_reader import StreamReader
from tests.rigs import virtual_time
from tests.rigs.typed_bodies import call as typed_call

PING = Comment(b": keep-alive\n\n")
WORD = Data(b'{"choices": [{"delta": {"content": "x"}}]}', DeltaKind.CONTENT)
FRAMES = [(3.0, PING), (2.0, WORD), (5.0, WORD), (100.0, WORD)]


class Paced:
    """Sends each frame after a delay."""

    name = "paced"
    is_local = False

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[AsyncIterator[Frame]]:
        await asyncio.sleep(1.0)
        yield self._frames()

    async def _frames(self) -> AsyncIterator[Frame]:
        for seconds, frame in FRAMES:
            await asyncio.sleep(seconds)
            yield frame


async def _listen() -> None:
    budget = Budget(Limits(1e3, 1e3, 1e6, 1e6, 2), asyncio.get_running_loop().time())
    listening = StreamReader(Paced(), typed_call(Endpoint.CHAT, "m", {}, "id"), budget, last=False)  # type: ignore[arg-type]
    opening = asyncio.create_task(listening.open())
    await asyncio.sleep(0.5)
    assert listening.silent_seconds() == 0.5
    await opening
    assert listening.longest_silence == 0.0, "the time until the stream is open does not count"
    for silence in (3.0, 3.0, 5.0):
        await asyncio.sleep(60.0)  # a client that reads slowly
        assert listening.silent_seconds() == 0.0
        await listening.next()
        assert listening.longest_silence == silence
    waiting = asyncio.create_task(listening.next())
    await asyncio.sleep(40.0)
    assert (listening.silent_seconds(), listening.longest_silence) == (40.0, 5.0)
    await waiting
    await listening.close()


def test_silence_counts_only_while_a_task_waits() -> None:
    virtual_time.run(_listen())
