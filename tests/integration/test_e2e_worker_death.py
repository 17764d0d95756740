"""SIGKILL of a busy worker: its request is answered by another model or ends in an error; the next one succeeds."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from tests.rigs.processes import is_alive
from tests.rigs.stack import Stack, chat_body, until

STALL_SECONDS = 2.0
"""A longer pause is a stall, also on a busy machine with two cores."""

STORY = "Tell me a long story about a water mill."


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    stack = await asyncio.to_thread(Stack(tmp_path).start)
    for name in ("demo", "demo-mini"):
        await asyncio.to_thread(stack.ask, "/v1/chat/completions", chat_body("Hello!", name))
    yield stack
    await asyncio.to_thread(stack.kill)


async def _listen(client: openai.AsyncOpenAI, stop: asyncio.Event) -> tuple[list[str], float]:
    """Streams the story from demo-mini until `stop`: all texts, and the longest pause in seconds."""
    texts: list[str] = []
    longest = 0.0
    while not stop.is_set():
        stream = await client.chat.completions.create(
            model="demo-mini", messages=[{"role": "user", "content": STORY}], stream=True, temperature=0
        )
        pieces: list[str] = []
        last: float | None = None
        async for chunk in stream:
            now = time.monotonic()
            longest = max(longest, now - (now if last is None else last))
            last = now
            pieces += [choice.delta.content or "" for choice in chunk.choices]
        texts.append("".join(pieces))
    return texts, longest


async def test_running_request_is_answered_by_another_tier_without_pauses_of_other_streams(stack: Stack) -> None:
    pid = stack.worker_pid("demo")
    stop = asyncio.Event()
    async with openai.AsyncOpenAI(base_url=stack.base_url, api_key=stack.key, max_retries=0, timeout=30) as client:
        neighbors = [asyncio.create_task(_listen(client, stop)) for _ in range(2)]
        os.kill(pid, signal.SIGSTOP)
        request = asyncio.create_task(
            client.chat.completions.with_raw_response.create(
                model="demo", messages=[{"role": "user", "content": "Hello!"}], temperature=0
            )
        )

        async def reached() -> bool:
            return bool((await asyncio.to_thread(stack.model, "demo"))["in_flight"] == 1)

        await until("the request reached the worker", reached)
        os.kill(pid, signal.SIGKILL)
        raw = await request
        again = await asyncio.to_thread(stack.ask, "/v1/chat/completions", chat_body("Hello!"))
        stop.set()
        streams = await asyncio.gather(*neighbors)
    assert raw.headers["x-headgate-tier"] == "local-fallback"
    assert raw.headers["x-headgate-model"] == "local/demo-mini"
    assert raw.headers["x-headgate-attempts"] == "2"
    assert raw.headers["x-headgate-reason"] == "model_failed"
    assert raw.parse().choices[0].message.content
    assert again["choices"][0]["message"]["content"]
    alone = await asyncio.to_thread(stack.ask, "/v1/chat/completions", chat_body(STORY, "demo-mini"))
    for texts, longest in streams:
        assert set(texts) == {alone["choices"][0]["message"]["content"]}
        assert longest < STALL_SECONDS, f"a neighbor's stream paused for {longest:.2f} s"


async def test_stream_that_cannot_be_resumed_ends_in_an_error_frame_without_done(stack: Stack) -> None:
    """Log probabilities of two models cannot be mixed in one answer."""
    import httpx2

    pid = stack.worker_pid("demo")
    # the answer does not end by itself
    body = chat_body(STORY, stream=True, logit_bias={"2": -100}, max_tokens=1900, logprobs=True)
    seen = b""
    async with (
        httpx2.AsyncClient(timeout=30) as client,
        client.stream(
            "POST",
            stack.base_url + "/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {stack.key}"},
        ) as answer,
    ):
        async for piece in answer.aiter_raw():
            if not seen:
                os.kill(pid, signal.SIGKILL)
            seen += piece
    assert not is_alive(pid)
    frames = [frame for frame in seen.split(b"\n\n") if frame.startswith(b"data: ")]
    assert b"[DONE]" not in frames[-1]
    assert b'"error"' in frames[-1]
