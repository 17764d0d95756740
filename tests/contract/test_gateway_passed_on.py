"""Frames of the local hop that are passed on as they come: none twice, none lost, the end and errors never."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from gateway.apis.openai.frames import Data, Done, Endpoint, Frame
from gateway.errors import UpstreamError
from gateway.providers.http_clients import make_local_session
from gateway.providers.local.local_provider import LocalProvider
from tests.rigs.typed_bodies import call as typed_call

pytestmark = pytest.mark.timeout(30)

CALL = typed_call(Endpoint.CHAT, "demo", {}, "id-1")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(text: str, finish: str | None = None) -> bytes:
    """One frame."""
    reason = "null" if finish is None else f'"{finish}"'
    return f'data: {{"choices":[{{"delta":{{"content":"{text}"}},"finish_reason":{reason}}}]}}\n\n'.encode()


class Service:
    """An inference service whose answer is written by hand."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.done = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        self.writer = writer
        self.asked.set()
        await self.done.wait()
        writer.close()

    def say(self, data: bytes) -> None:
        """Writes a chunk."""
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))


@pytest.fixture
async def service() -> AsyncIterator[tuple[Service, LocalProvider]]:
    service = Service()
    server = await asyncio.start_server(service.serve, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    provider = LocalProvider(f"http://127.0.0.1:{port}", None, make_local_session())
    yield service, provider
    service.done.set()
    await provider.aclose()
    server.close()
    await server.wait_closed()


class Sink:
    """Takes frames up to one that says `stop`."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.got = asyncio.Event()

    def take(self, frames: list[Frame]) -> bool:
        """Whether they were taken."""
        if any(isinstance(frame, Data) and b"stop here" in frame.payload for frame in frames):
            return False
        if any(isinstance(frame, Data) and b"fail here" in frame.payload for frame in frames):
            raise ValueError("a defect")
        self.frames += frames
        self.got.set()
        return True


@contextlib.asynccontextmanager
async def listening(service: Service, provider: LocalProvider) -> AsyncIterator[tuple[Sink, asyncio.Task[Frame]]]:
    """A stream whose reader waits, and its sink."""
    sink = Sink()
    async with provider.stream(CALL) as stream:
        await service.asked.wait()
        stream.pass_on(sink.take)  # type: ignore[attr-defined]
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        yield sink, waiting  # type: ignore[misc]


async def test_taken_frames_wake_nobody_and_what_is_refused_does(service: tuple[Service, LocalProvider]) -> None:
    said, provider = service
    async with listening(said, provider) as (sink, waiting):
        said.say(chunk("a") + chunk("b"))
        await sink.got.wait()
        assert len(sink.frames) == 2
        assert not waiting.done()
        said.say(chunk("stop here"))
        assert b"stop here" in (await waiting).payload  # type: ignore[union-attr]
        assert len(sink.frames) == 2


async def test_the_end_and_what_came_with_it_are_for_who_waits(service: tuple[Service, LocalProvider]) -> None:
    said, provider = service
    async with listening(said, provider) as (sink, waiting):
        said.say(chunk("a", "stop") + b"data: [DONE]\n\n")
        assert isinstance(await waiting, Data)
        assert sink.frames == []
        said.done.set()


async def test_an_error_reaches_who_waits(service: tuple[Service, LocalProvider]) -> None:
    said, provider = service
    async with listening(said, provider) as (sink, waiting):
        said.say(chunk("a"))
        await sink.got.wait()
        said.done.set()
        with pytest.raises(UpstreamError, match="broke off"):
            await waiting
        assert not any(isinstance(frame, Done) for frame in sink.frames)


async def test_a_defect_of_who_passes_on_loses_nothing(
    service: tuple[Service, LocalProvider], caplog: pytest.LogCaptureFixture
) -> None:
    said, provider = service
    async with listening(said, provider) as (_sink, waiting):
        said.say(chunk("fail here"))
        assert b"fail here" in (await waiting).payload  # type: ignore[union-attr]
    assert "could not be relayed" in caplog.text
