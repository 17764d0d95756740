"""Requests wait for threads and places without blocking the event loop or holding their files."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inference.protocol import Code
from inference.worker.api.body_intake import Intake
from inference.worker.api.worker_app import App
from inference.worker.api.worker_exchange import Exchange
from inference.worker.backend import ImageTile
from inference.worker.engine.engine import Engine
from inference.worker.engine.output_tickets import OutputDispatcher
from inference.worker.prompt.prompts import Prompts
from inference.worker.prompt.vision import MAX_FILES_BYTES, Vision
from inference.worker.steps import Limits
from inference.worker.worker_errors import GoneError, UnloadedError, WorkerError
from inference.worker.worker_requests import Facts
from tests.rigs.fake_backend import ByteVocabulary, FakeBackend, SamplerShop


class _Client:
    """Sends an empty object, and disconnects when `leaves` is set."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self.watched = asyncio.Event()
        self._sent = False
        scope = {"method": "POST", "path": "/v1/chat/completions", "headers": [(b"content-length", b"2")]}
        self.exchange = Exchange(scope, self._receive, self._send)

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": b"{}"}
        self.watched.set()
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        raise AssertionError(message)


def test_request_of_a_disconnected_client_is_not_decoded() -> None:
    """A callback that is added after the disconnect is called too."""
    decoded: list[str] = []

    async def scenario() -> None:
        held = threading.Event()
        left, stayed = _Client(), _Client()
        with ThreadPoolExecutor(1) as executor:
            executor.submit(held.wait)
            intake = Intake(executor)
            first = asyncio.create_task(intake.decoded(left.exchange, lambda _body: decoded.append("left")))
            second = asyncio.create_task(intake.decoded(stayed.exchange, lambda _body: decoded.append("stayed")))
            try:
                await left.watched.wait()
                await stayed.watched.wait()
                seen = asyncio.Event()
                left.exchange.on_disconnect(seen.set)
                left.leaves.set()
                await seen.wait()
            finally:
                held.set()
            with pytest.raises(GoneError):
                await first
            await second
        called: list[str] = []
        left.exchange.on_disconnect(lambda: called.append("left"))
        stayed.exchange.on_disconnect(lambda: called.append("stayed"))
        assert called == ["left"]
        stayed.exchange.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert decoded == ["stayed"]


FACTS = Facts("tiny", 100, 257, 8, ("completions",))
LIMITS = Limits(slots=4, context=100, batch=32, queue=4)


class Bytes:
    """Every byte is a token."""

    bos = None
    adds_bos = False
    longest_piece = None
    fill_tokens = None

    def text_of(self, token: int | None) -> str:
        return ""

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        return list(text.encode())


async def ask(app: App, body: dict[str, Any]) -> bytes:
    sent: list[MutableMapping[str, Any]] = []
    raw = json.dumps(body).encode()
    read = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if read.is_set():
            await asyncio.Event().wait()
        read.set()
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-length", str(len(raw)).encode())]
    await app({"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}, receive, send)
    return b"".join(message.get("body", b"") for message in sent)


@pytest.mark.parametrize("stream", [False, True])
async def test_echoed_prompt_is_detokenized_off_the_event_loop(stream: bool) -> None:
    threads: set[str] = set()

    def detokenize(tokens: list[int]) -> str:
        threads.add(threading.current_thread().name.split("_")[0])
        return bytes(tokens).decode()

    engine = Engine(
        FakeBackend(),
        ByteVocabulary(),
        SamplerShop(b"abc"),
        LIMITS,
        OutputDispatcher(asyncio.get_running_loop()).deliver,
        lambda _message: None,
    )
    engine.start()
    with ThreadPoolExecutor(1, thread_name_prefix="prompts") as executor:
        app = App(FACTS, Prompts(Bytes(), None, FACTS), detokenize, engine, None, executor)
        answer = await ask(app, {"prompt": [104, 105], "echo": True, "max_tokens": 1, "stream": stream})
    assert engine.stop(UnloadedError())
    assert b'"text":"hi' in answer
    assert threads == {"prompts"}


class UnusedProjector:
    """A projector that must not be called."""

    width = 4

    def read(self, data: bytes) -> list[Sequence[int] | ImageTile]:
        raise AssertionError("an image was read")

    def encode(self, picture: ImageTile) -> None:
        raise AssertionError("an image was encoded")


@pytest.fixture
async def vision() -> Vision:
    return Vision(UnusedProjector(), 100, 1, at_once=50)


async def full(vision: Vision, size: int) -> bool:
    try:
        async with vision.place(0.0, size):
            return False
    except WorkerError as error:
        return error.code is Code.QUEUE_FULL


async def test_image_files_of_waiting_requests_are_limited_in_bytes(vision: Vision) -> None:
    half = MAX_FILES_BYTES // 2
    async with vision.place(None, half) as let_go:
        waiting = asyncio.create_task(_wait(vision, half))
        await asyncio.sleep(0)
        assert await full(vision, 1), "a running and a waiting request use the whole limit"
        let_go()
        assert not await full(vision, half), "a decoded image holds no file"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not await full(vision, MAX_FILES_BYTES)
    assert not await full(vision, MAX_FILES_BYTES), "the bytes are released in the end"


async def _wait(vision: Vision, size: int) -> None:
    async with vision.place(None, size):
        raise AssertionError("the only place is taken")
