"""Silence of a stream counts only while a task waits for it; frames that a sink refuses count once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

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


class Offering:
    """A stream that offers its frames to a sink and keeps those that are refused."""

    name = "offering"
    is_local = True

    def __init__(self) -> None:
        self.kept: list[Frame] = []

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[Offering]:
        yield self

    def pass_on(self, sink: Callable[[list[Frame]], bool]) -> None:
        self._sink = sink

    def arrive(self, frames: list[Frame]) -> None:
        if not self._sink(frames):
            self.kept += frames

    def take_ready(self) -> list[Frame]:
        frames, self.kept = self.kept, []
        return frames


@pytest.mark.parametrize("accepts", [True, False])
async def test_each_frame_is_counted_once(accepts: bool) -> None:
    """Also a frame that the sink refuses and that is read later."""
    budget = Budget(Limits(1e3, 1e3, 1e6, 1e6, 2), asyncio.get_running_loop().time())
    provider, seen = Offering(), []
    call = typed_call(Endpoint.CHAT, "m", {}, "id")
    reader = StreamReader(provider, call, budget, last=False, on_frame=seen.append)  # type: ignore[arg-type]
    await reader.open()
    reader.pass_on(lambda frames: accepts)
    provider.arrive([WORD, WORD])
    assert reader.ready() == ([] if accepts else [WORD, WORD])
    assert (reader.pieces, seen) == (2, [WORD, WORD])
    await reader.close()
