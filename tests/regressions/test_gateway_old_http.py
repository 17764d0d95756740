"""Callers of HTTP/1.0, which knows no chunks, were streamed chunks; their stream ends with the connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import KEY, Gateway


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url) as gateway:
        yield gateway


async def _asked(gateway: Gateway, *, stream: bool) -> tuple[str, str]:
    """Head and body of what comes until the gateway closes the connection."""
    body = json.dumps({"model": "demo", "stream": stream, "messages": [{"role": "user", "content": "hi"}]})
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    head = f"POST /v1/chat/completions HTTP/1.0\nHost: localhost\nx-api-key: {KEY}\nContent-Length: {len(body)}\n\n"
    writer.write(head.replace("\n", "\r\n").encode() + body.encode())
    async with asyncio.timeout(5):
        answer = (await reader.read()).decode()
    writer.close()
    head, _, rest = answer.partition("\r\n\r\n")
    return head, rest


async def test_a_stream_is_its_frames_and_nothing_else(gateway: Gateway) -> None:
    head, body = await _asked(gateway, stream=True)

    assert head.startswith("HTTP/1.1 200 ")
    assert "transfer-encoding" not in head
    assert "connection: close" in head
    frames = body.removesuffix("\n\n").split("\n\n")
    assert all(frame.startswith("data: ") for frame in frames)
    assert frames[-1] == "data: [DONE]"


async def test_an_answer_that_is_not_streamed_has_its_length(gateway: Gateway) -> None:
    head, body = await _asked(gateway, stream=False)

    assert f"content-length: {len(body)}" in head
    assert json.loads(body)["object"] == "chat.completion"
