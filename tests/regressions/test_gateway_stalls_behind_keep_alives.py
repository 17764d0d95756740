"""A cloud that stalled but went on with its keep-alives: every one re-armed the deadlines, so nobody ever left it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.apis.openai.frames import Comment, Data, DeltaKind, Endpoint, Frame
from gateway.providers.provider import Call
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
    """A provider that sends each frame after so many seconds, and its last one again and again for ever."""

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


def listened(script: Iterable[tuple[float, Frame]], *, busy_seconds: float = 0.0, frames: int = 10**6) -> float | None:
    """After how many seconds the provider was left for its silence; None when `frames` came before that.

    `busy_seconds` is how long each frame kept the gateway busy: a client that reads slowly.
    """

    async def run() -> float | None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        budget = Budget(Limits(FIRST_TOKEN, INTER_TOKEN, 1e6, 1e6, 2), began)
        call = typed_call(Endpoint.CHAT, "m", {}, "id")
        listening = StreamReader(Scripted(script), call, budget, last=False)  # type: ignore[arg-type]
        try:
            await listening.open()
            for _ in range(frames):
                await listening.next()
                await asyncio.sleep(busy_seconds)
        except ExpiredError as error:
            assert error.due is Due.SILENCE
            return round(loop.time() - began, 3)
        finally:
            await listening.close()
        return None

    return virtual_time.run(run())


LONG = KEEP_ALIVE_FACTOR * FIRST_TOKEN


@pytest.mark.parametrize("idle", [PING, EMPTY], ids=["comments", "chunks with nothing in them"])
def test_keep_alives_stand_for_an_answer_only_so_long(idle: Frame) -> None:
    """Before its first word and after any; a word in between begins the time anew."""
    assert listened([(1, idle)]) == LONG
    assert listened([(1, WORD), (1, idle)]) == 1 + LONG
    assert listened([(1, idle)] * 100 + [(1, WORD), (1, idle)]) == 101 + LONG


def test_progress_of_our_own_service_and_words_re_arm_for_ever() -> None:
    assert listened([(10, LOADING)], frames=1000) is None
    assert listened([(10, WORD)], frames=1000) is None
    assert listened([(10, LOADING), (10, PING)] * 50, frames=100) is None
    assert listened([(1, LOADING), (1, PING)]) == 1 + LONG


def test_silence_without_keep_alives_ends_as_before() -> None:
    assert listened([(1, PING), (1000, PING)]) == 1 + FIRST_TOKEN
    assert listened([(1, WORD), (1, PING), (1000, PING)]) == 2 + INTER_TOKEN


def test_what_a_slow_client_takes_is_nobodys_silence() -> None:
    """Two keep-alives, 200 seconds of a client that does not read, and the next word a second later."""
    assert listened([(1, PING)] * 4 + [(1, WORD)], busy_seconds=200, frames=10) is None
    assert listened([(1, WORD), (1, PING)], busy_seconds=9) == 10 + LONG * 10 - 9


async def test_a_cloud_that_only_pings_is_left_blamed_and_another_tier_answers(tmp_path: Path) -> None:
    """Streamed and whole, before the first word and after it, in both dialects."""
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


async def test_a_cloud_that_only_pinged_does_not_go_on_with_its_answer(tmp_path: Path) -> None:
    """It was asked three times, and kept its caller waiting for three times the keep-alives' bound."""
    asked = {"openai": ["openai"], "google": ["google"], "anthropic": ["anthropic"], "two": ["openai", "anthropic"]}
    async with (
        FakeInference("token") as fake,
        FakeProvider() as cloud,
        Gateway(tmp_path, fake.url, CLOUDS.format(url=cloud.url), {"CLOUD": CLOUD_KEY}) as gateway,
    ):
        await gateway.look()
        answers = await asyncio.gather(*(gateway.chat(route, stream=True) for route in asked))
        for route, answer in zip(asked, answers, strict=True):
            assert '"error"' in answer.text and "[DONE]" not in answer.text, (route, answer.text)
            told = await gateway.admin("GET", f"/admin/requests/{answer.headers['x-request-id']}")
            assert [tried["name"].partition("/")[0] for tried in told.json()["attempts"]] == asked[route], told.text
