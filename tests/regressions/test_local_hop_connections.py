"""After a burst of requests the connections between the services close within seconds; they once stayed for 75 s."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headgate.shared.state import INFERENCE_TOKEN
from tests.rigs.stack import Stack, chat_body, until

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")

BURST = 200
FEW = 10


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("hop")).start()
    yield stack
    stack.kill()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        yield client


def _descriptors(pid: int | None) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def _burst(client: aiohttp.ClientSession, url: str, key: str, body: dict[str, Any]) -> None:
    async def ask() -> None:
        async with client.post(url, json=body, headers={"authorization": f"Bearer {key}"}) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()

    await ask()
    await asyncio.gather(*(ask() for _ in range(BURST)))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_connections_of_the_gateway_to_inference_close_after_a_burst(
    stack: Stack, client: aiohttp.ClientSession, stream: bool
) -> None:
    pids = [stack.front.pid, stack.inference.pid]
    before = [_descriptors(pid) for pid in pids]
    body = chat_body("Hello", "demo-mini", max_tokens=4, stream=stream)
    await _burst(client, f"{stack.gateway_url}/v1/chat/completions", stack.key, body)
    assert _descriptors(stack.inference.pid) > before[1] + BURST // 2, "the burst came over many connections"
    await client.close()
    for pid, count in zip(pids, before, strict=True):
        await until("idle connections are closed", lambda pid=pid, count=count: _descriptors(pid) <= count + FEW)


async def test_connections_of_inference_to_a_worker_close_after_a_burst(
    stack: Stack, client: aiohttp.ClientSession
) -> None:
    """Answers that come whole use a pool of connections of their own."""
    token = stack.state.read_secret(INFERENCE_TOKEN)
    assert token is not None
    stack.ask("/v1/chat/completions", chat_body("Hello", "demo-mini", max_tokens=1))
    worker = stack.worker_pid("demo-mini")
    before = _descriptors(worker)
    body = {"model": "demo-mini", "content": "word " * 1000}
    await _burst(client, f"{stack.inference.url}/tokenize", token, body)
    assert _descriptors(worker) > before + FEW, "the burst came over many connections"
    await client.close()
    await until("the worker has closed them", lambda: _descriptors(worker) < before + FEW)
