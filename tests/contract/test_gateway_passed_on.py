"""Frames of the local hop that are relayed as bytes: each once and in order; ends and errors are not relayed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from gateway.apis.openai.frames import Data, Done, Endpoint, Frame
from gateway.errors import UpstreamError
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
    """An inference service whose answer the test writes."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.done = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection."""
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        self.writer = writer
        self.requested.set()
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
    provider = LocalProvider(f"http://127.0.0.1:{port}", None)
    yield service, provider
    service.done.set()
    await provider.aclose()
    server.close()
    await server.wait_closed()


class Sink:
    """Accepts frames up to one with the text `stop`."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.got = asyncio.Event()

    def take(self, frames: list[Frame]) -> bool:
        """Whether the frames were accepted."""
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
        await service.requested.wait()
        stream.pass_on(sink.take)  # type: ignore[attr-defined]
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        yield sink, waiting  # type: ignore[misc]


async def test_accepted_frames_do_not_wake_the_reader_and_refused_ones_do(
    service: tuple[Service, LocalProvider],
) -> None:
    upstream, provider = service
    async with listening(upstream, provider) as (sink, waiting):
        upstream.say(chunk("a") + chunk("b"))
        await sink.got.wait()
        assert len(sink.frames) == 2
        assert not waiting.done()
        upstream.say(chunk("stop here"))
        assert b"stop here" in (await waiting).payload  # type: ignore[union-attr]
        assert len(sink.frames) == 2


async def test_last_frames_are_left_to_the_reader_of_the_stream(service: tuple[Service, LocalProvider]) -> None:
    upstream, provider = service
    async with listening(upstream, provider) as (sink, waiting):
        upstream.say(chunk("a", "stop") + b"data: [DONE]\n\n")
        assert isinstance(await waiting, Data)
        assert sink.frames == []
        upstream.done.set()


async def test_error_goes_to_the_reader(service: tuple[Service, LocalProvider]) -> None:
    upstream, provider = service
    async with listening(upstream, provider) as (sink, waiting):
        upstream.say(chunk("a"))
        await sink.got.wait()
        upstream.done.set()
        with pytest.raises(UpstreamError, match="interrupted"):
            await waiting
        assert not any(isinstance(frame, Done) for frame in sink.frames)


async def test_exception_of_the_sink_loses_no_frame(
    service: tuple[Service, LocalProvider], caplog: pytest.LogCaptureFixture
) -> None:
    upstream, provider = service
    async with listening(upstream, provider) as (_sink, waiting):
        upstream.say(chunk("fail here"))
        assert b"fail here" in (await waiting).payload  # type: ignore[union-attr]
    assert "could not be relayed" in caplog.text
