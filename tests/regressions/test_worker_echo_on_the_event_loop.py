"""The text of an echoed prompt was made on the event loop, which stood still for it: 0.16 s for a million tokens."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inference.worker.api.worker_app import App
from inference.worker.engine.engine import Engine
from inference.worker.engine.output_tickets import OutputDispatcher
from inference.worker.prompt.prompts import Prompts
from inference.worker.steps import Limits
from inference.worker.worker_errors import UnloadedError
from inference.worker.worker_requests import Facts
from tests.rigs.fake_backend import ByteVocabulary, FakeBackend, SamplerShop

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
    said: list[MutableMapping[str, Any]] = []
    raw = json.dumps(body).encode()
    read = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if read.is_set():
            await asyncio.Event().wait()
        read.set()
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        said.append(message)

    headers = [(b"content-length", str(len(raw)).encode())]
    await app({"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}, receive, send)
    return b"".join(message.get("body", b"") for message in said)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_text_of_an_echo_is_made_off_the_loop(stream: bool) -> None:
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
        said = await ask(app, {"prompt": [104, 105], "echo": True, "max_tokens": 1, "stream": stream})
    assert engine.stop(UnloadedError())
    assert b'"text":"hi' in said
    assert threads == {"prompts"}
