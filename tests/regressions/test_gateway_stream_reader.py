"""Deadlines of streams: keep-alives, buffered frames and slow clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.apis.openai.frames import Comment, Data, DeltaKind, Endpoint, Frame
from gateway.breaker.breakers import Breakers, Lease
from gateway.breaker.permits import Rule
from gateway.errors import UpstreamError
from gateway.providers.local.local_stream import LocalStream
from gateway.providers.provider import Call
from gateway.routing.attempt import Attempt
from gateway.routing.budget import KEEP_ALIVE_FACTOR, Budget, Due, Limits
from gateway.routing.stream_reader import ExpiredError, StreamReader
from inference.protocol import Progress
from tests.rigs import virtual_time
from tests.rigs.fake_inference import FakeInference
from tests.rigs.fake_provider import KEY as CLOUD_KEY
from tests.rigs.fake_provider import FakeProvider
from tests.rigs.gateway_rig import Gateway
from tests.rigs.typed_bodies import call as typed_call

pytestmark = pytest.mark.timeout(60)

CONFIG = """
providers:
  openai: {{kind: openai, api_key: "${{env:CLOUD}}", base_url: {url}/v1}}
  anthropic: {{kind: anthropic, api_key: "${{env:CLOUD}}", base_url: {url}}}
routes:
  openai early: {{chain: [openai/fault-ping, local/demo]}}
  openai late: {{chain: [openai/fault-ping=1, local/demo]}}
  anthropic early: {{chain: [anthropic/fault-ping, local/demo]}}
  anthropic late: {{chain: [anthropic/fault-ping=1, local/demo]}}
deadlines: {{connect: 1s, first_token: 250ms, inter_token: 600ms, total: 6s}}
"""
CLOUDS = """
providers:
  openai: {{kind: openai, api_key: "${{env:CLOUD}}", base_url: {url}/v1}}
  google: {{kind: openai, flavor: google, api_key: "${{env:CLOUD}}", base_url: {url}/v1beta/openai}}
  anthropic: {{kind: anthropic, api_key: "${{env:CLOUD}}", base_url: {url}}}
routes:
  openai: {{chain: [openai/fault-ping=1]}}
  google: {{chain: [google/fault-ping=1]}}
  anthropic: {{chain: [anthropic/fault-ping=1]}}
  two: {{chain: [openai/fault-ping=2, anthropic/fault-ping=2]}}
deadlines: {{connect: 1s, first_token: 750ms, inter_token: 3s, total: 30s}}
"""
FIRST_TOKEN, INTER_TOKEN = 30.0, 15.0
PING = Comment(b": keep-alive\n\n")
EMPTY = Data(b'{"choices": []}', DeltaKind.OTHER)
WORD = Data(b'{"choices": [{"delta": {"content": "x"}}]}', DeltaKind.CONTENT)
LOADING = Comment(Progress("loading", 40, 100).frame())


class Scripted:
    """A provider that sends each frame after its delay, and repeats the last one without an end."""

    name = "scripted"
    is_local = False

    def __init__(self, script: Iterable[tuple[float, Frame]]) -> None:
        self._script = tuple(script)

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[AsyncIterator[Frame]]:
        yield self._frames()

    async def _frames(self) -> AsyncIterator[Frame]:
        for seconds, frame in self._script:
            await asyncio.sleep(seconds)
            yield frame
        while True:
            await asyncio.sleep(seconds)
            yield frame


def seconds_until_expiry(
    script: Iterable[tuple[float, Frame]], *, busy_seconds: float = 0.0, frames: int = 10**6
) -> float | None:
    """Seconds until the stream expired; None when `frames` arrived before.

    `busy_seconds` is the time that the client takes for each frame.
    """

    async def run() -> float | None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        budget = Budget(Limits(FIRST_TOKEN, INTER_TOKEN, 1e6, 1e6, 2), began)
        call = typed_call(Endpoint.CHAT, "m", {}, "id")
        reader = StreamReader(Scripted(script), call, budget, last=False)  # type: ignore[arg-type]
        try:
            await reader.open()
            for _ in range(frames):
                await reader.next()
                await asyncio.sleep(busy_seconds)
        except ExpiredError as error:
            assert error.due is Due.SILENCE
            return round(loop.time() - began, 3)
        finally:
            await reader.close()
        return None

    return virtual_time.run(run())


LONG = KEEP_ALIVE_FACTOR * FIRST_TOKEN


@pytest.mark.parametrize("idle", [PING, EMPTY], ids=["comments", "chunks with nothing in them"])
def test_keep_alives_extend_the_deadline_by_a_limited_time(idle: Frame) -> None:
    """Content starts the time again."""
    assert seconds_until_expiry([(1, idle)]) == LONG
    assert seconds_until_expiry([(1, WORD), (1, idle)]) == 1 + LONG
    assert seconds_until_expiry([(1, idle)] * 100 + [(1, WORD), (1, idle)]) == 101 + LONG


def test_progress_comments_and_content_extend_the_deadline_without_limit() -> None:
    assert seconds_until_expiry([(10, LOADING)], frames=1000) is None
    assert seconds_until_expiry([(10, WORD)], frames=1000) is None
    assert seconds_until_expiry([(10, LOADING), (10, PING)] * 50, frames=100) is None
    assert seconds_until_expiry([(1, LOADING), (1, PING)]) == 1 + LONG


def test_silence_after_a_keep_alive_expires() -> None:
    assert seconds_until_expiry([(1, PING), (1000, PING)]) == 1 + FIRST_TOKEN
    assert seconds_until_expiry([(1, WORD), (1, PING), (1000, PING)]) == 2 + INTER_TOKEN


def test_time_of_a_slow_client_is_not_silence_of_the_provider() -> None:
    assert seconds_until_expiry([(1, PING)] * 4 + [(1, WORD)], busy_seconds=200, frames=10) is None
    assert seconds_until_expiry([(1, WORD), (1, PING)], busy_seconds=9) == 10 + LONG * 10 - 9


async def test_cloud_that_sends_only_keep_alives_fails_and_the_next_tier_answers(tmp_path: Path) -> None:
    async with (
        FakeInference("token") as fake,
        FakeProvider() as cloud,
        Gateway(tmp_path, fake.url, CONFIG.format(url=cloud.url), {"CLOUD": CLOUD_KEY}) as gateway,
    ):
        await gateway.look()
        names = [f"{cloud} {when}" for cloud in ("openai", "anthropic") for when in ("early", "late")]
        whole = asyncio.gather(*(gateway.chat(name) for name in names))
        streamed = asyncio.gather(*(gateway.chat(name, stream=True) for name in names))
        for answer in await whole:
            assert (answer.status_code, answer.headers["x-headgate-model"]) == (200, "local/demo"), answer.text
            assert answer.headers["x-headgate-reason"] == "timeout"
        for name, answer in zip(names, await streamed, strict=True):
            assert answer.text.endswith("data: [DONE]\n\n"), (name, answer.text)
            assert (": headgate resumed on local/demo" in answer.text) == name.endswith("late")
        for name in ("openai/fault-ping", "openai/fault-ping=1", "anthropic/fault-ping", "anthropic/fault-ping=1"):
            assert (await gateway.breaker(name))["failures"] == 2


async def test_cloud_that_sends_only_keep_alives_after_its_first_tokens_is_tried_once(tmp_path: Path) -> None:
    """Another cloud of the chain resumes the answer; without one it ends in an error."""
    tried = {"openai": ["openai"], "google": ["google"], "anthropic": ["anthropic"], "two": ["openai", "anthropic"]}
    async with (
        FakeInference("token") as fake,
        FakeProvider() as cloud,
        Gateway(tmp_path, fake.url, CLOUDS.format(url=cloud.url), {"CLOUD": CLOUD_KEY}) as gateway,
    ):
        await gateway.look()
        answers = await asyncio.gather(*(gateway.chat(route, stream=True) for route in tried))
        for route, answer in zip(tried, answers, strict=True):
            assert '"error"' in answer.text and "[DONE]" not in answer.text, (route, answer.text)
            record = await gateway.admin("GET", f"/admin/requests/{answer.headers['x-request-id']}")
            names = [attempt["name"].partition("/")[0] for attempt in record.json()["attempts"]]
            assert names == tried[route], record.text


CALL = typed_call(Endpoint.CHAT, "demo", {}, "id")
WORD_BYTES = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":null}]}\n\n'
ROLE = b'data: {"choices":[{"delta":{"role":"assistant"},"finish_reason":null}]}\n\n'
PING_BYTES = b": keep-alive\n\n"
PROGRESS = b": headgate prefill 1/2\n\n"
LOCAL_FIRST_TOKEN, LOCAL_INTER_TOKEN = 10.0, 30.0


class FakeResponse:
    """A response of the inference service; the test delivers its pieces."""

    status = 200
    headers = {"content-type": "text/event-stream"}  # noqa: RUF012  # as a response has them

    def __init__(self, *first: bytes) -> None:
        self._first = first

    def listen(self, on_piece: Callable[[bytes], None], on_end: Callable[[Any], None]) -> None:
        self.deliver, self.ends = on_piece, on_end
        for piece in self._first:
            on_piece(piece)

    def pause(self) -> None:
        """The test never delivers ahead."""

    def resume(self) -> None:
        """The test never delivers ahead."""

    def close(self, linger_seconds: float = 0.0) -> None:
        """Nothing to close."""


def reader_of(
    answer: FakeResponse, *, opens_after: float = 0.0, last: bool = True, silence: float | None = None
) -> StreamReader:
    async def ask(_call: Call, _body: bytes) -> FakeResponse:
        await asyncio.sleep(opens_after)
        return answer

    provider = SimpleNamespace(name="local", stream=lambda call: LocalStream(ask, call, b""))  # type: ignore[arg-type]
    budget = Budget(
        Limits(LOCAL_FIRST_TOKEN, LOCAL_INTER_TOKEN, 1e6, 1e6, 3, silence), asyncio.get_running_loop().time()
    )
    return StreamReader(provider, CALL, budget, last=last)  # type: ignore[arg-type]


async def expiry_seconds(stream: StreamReader) -> float:
    """Seconds from now until the stream expires."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(ExpiredError):
        while True:
            stream.ready() or await stream.next()
    await stream.close()
    return round(loop.time() - began, 3)


def test_buffered_keep_alive_starts_the_deadline_when_it_is_read() -> None:
    async def run() -> float:
        answer = FakeResponse(WORD_BYTES)
        stream = reader_of(answer)
        await stream.open()
        assert len(stream.ready()) == 1
        await asyncio.sleep(25)
        answer.deliver(PING_BYTES)
        await asyncio.sleep(1)
        assert len(stream.ready()) == 1
        return await expiry_seconds(stream)

    assert virtual_time.run(run()) == LOCAL_INTER_TOKEN


def test_time_of_opening_is_not_part_of_the_silence_after_the_first_frame() -> None:
    """The client waits a second; a tier that is not the last one gets half of it."""

    async def run() -> float:
        stream = reader_of(FakeResponse(ROLE), opens_after=0.4, last=False, silence=1.0)
        await stream.open()
        return await expiry_seconds(stream)

    assert virtual_time.run(run()) == 0.5


async def test_comments_after_the_first_content_are_forwarded() -> None:
    attempt = Attempt.__new__(Attempt)
    attempt.last, attempt.backlog = True, []
    attempt._has_content, attempt._is_replaceable = True, False
    attempt._lease = Lease((), Breakers(Rule()), ("p", "m"))
    attempt._state = SimpleNamespace(context=SimpleNamespace(silence_seconds=None), began=1e12)  # type: ignore[assignment]
    attempt.reader = reader_of(FakeResponse(PING_BYTES + ROLE + PROGRESS + WORD_BYTES + PROGRESS + WORD_BYTES))
    await attempt.open(forward_comments=True)
    assert [type(frame) for frame in attempt.backlog] == [Data, Data, Comment, Data], "earlier comments are dropped"
    await attempt.reader.close()


async def test_error_frame_is_raised_before_the_connection_closes() -> None:
    answer = FakeResponse()
    stream = reader_of(answer)
    await stream.open()
    waiting = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    answer.deliver(b"data: oops\n\n")
    with pytest.raises(UpstreamError, match="oops"):
        await asyncio.wait_for(waiting, 5)
    await stream.close()


class Silent:
    """A provider that never answers."""

    name = "silent"
    is_local = True

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[AsyncIterator[Frame]]:
        await asyncio.Event().wait()
        yield  # type: ignore[misc]


@pytest.mark.parametrize("times", [1, 2])
async def test_repeated_abort_raises_one_expiry(times: int) -> None:
    """A probe and a deadline may abort the same stream."""
    budget = Budget(Limits(30, 15, 300, 120, 2), asyncio.get_running_loop().time())
    reader = StreamReader(Silent(), typed_call(Endpoint.CHAT, "m", {}, "id"), budget, last=False)  # type: ignore[arg-type]
    opening = asyncio.create_task(reader.open())
    await asyncio.sleep(0)
    for _ in range(times):
        reader.abort()
    with pytest.raises(ExpiredError) as caught:
        await opening
    assert caught.value.due is Due.SILENCE
    await reader.close()
