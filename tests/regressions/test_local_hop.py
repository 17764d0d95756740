"""Connections between the gateway, the inference service and the workers."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headgate.shared import hop, ports
from headgate.shared.hop import BrokenError, Hop
from tests.rigs.stack import Stack, chat_body, until

LINUX = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")

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


def _open_descriptors(pid: int | None) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def _burst(client: aiohttp.ClientSession, url: str, key: str, body: dict[str, Any]) -> None:
    async def ask() -> None:
        async with client.post(url, json=body, headers={"authorization": f"Bearer {key}"}) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()

    await ask()
    await asyncio.gather(*(ask() for _ in range(BURST)))


@LINUX
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_connections_of_the_gateway_to_inference_close_after_a_burst(
    stack: Stack, client: aiohttp.ClientSession, stream: bool
) -> None:
    pids = [stack.front.pid, stack.inference.pid]
    before = [_open_descriptors(pid) for pid in pids]
    body = chat_body("Hello", "demo-mini", max_tokens=4, stream=stream)
    await _burst(client, f"{stack.gateway_url}/v1/chat/completions", stack.key, body)
    assert _open_descriptors(stack.inference.pid) > before[1] + BURST // 2, "the burst used many connections"
    await client.close()
    for pid, count in zip(pids, before, strict=True):
        await until("idle connections are closed", lambda pid=pid, count=count: _open_descriptors(pid) <= count + FEW)


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def _two_requests(raw: bytes) -> tuple[list[Any], int, list[dict[str, Any]]]:
    """Sends two requests to a service that answers `raw`: answers or errors, connections, complaints of the loop."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    served: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(raw)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    client = Hop(hop.tcp("127.0.0.1", server.sockets[0].getsockname()[1]), "here", idle_seconds=60.0)
    answers: list[Any] = []
    for _ in range(2):
        try:
            answer = await client.post("/", b"", {})
        except BrokenError as error:
            answers.append(error)
            continue
        answers.append((answer.status, answer.headers, await answer.whole()))
        answer.close()
    client.close()
    server.close()
    await asyncio.gather(*(task for task in served if task is not None))
    await server.wait_closed()
    return answers, len(served), complaints


@pytest.mark.parametrize(
    "surplus", [b"HTTP/1.1 200 OK\r\nx: y\r\ncontent-length: 4\r\n\r\nmore", b"junk"], ids=["an answer", "junk"]
)
async def test_bytes_after_a_complete_answer_are_dropped_with_their_connection(surplus: bytes) -> None:
    answers, connections, complaints = await _two_requests(OK + surplus)
    assert answers == [(200, {"content-length": "2"}, b"ok")] * 2
    assert connections == 2
    assert complaints == []


async def test_protocol_upgrade_is_a_broken_answer() -> None:
    answers, _, complaints = await _two_requests(
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nx"
    )
    assert all(isinstance(answer, BrokenError) and "not HTTP" in str(answer) for answer in answers)
    assert complaints == []


async def test_accepted_connections_have_nagle_delay_disabled() -> None:
    taken: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        here: socket.socket = writer.get_extra_info("socket")
        taken.set_result(here.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with ports.listen("127.0.0.1", 0) as sock:
        async with await asyncio.start_server(take, sock=sock), asyncio.timeout(5):
            _, writer = await asyncio.open_connection(*sock.getsockname())
            assert await taken
            writer.close()
