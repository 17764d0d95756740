"""Whole answers on kept and closed connections, and to pipelined requests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import KEY, MESSAGES, Gateway


def _request(version: str = "1.1", more: str = "") -> bytes:
    body = json.dumps({"model": "demo", "messages": MESSAGES})
    head = f"POST /v1/chat/completions HTTP/{version}\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n{more}"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


async def _answer(reader: asyncio.StreamReader) -> tuple[dict[str, str], dict[str, object]]:
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    assert status == "HTTP/1.1 200 OK"
    headers = dict(line.split(": ", 1) for line in lines)
    assert len(headers) == len(lines), "no header is repeated"
    return headers, json.loads(await reader.readexactly(int(headers["content-length"])))


async def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async with FakeInference() as fake, Gateway(tmp_path, fake.url) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rsplit(":", 1)[1]))
        writer.write(b"".join(_request(more=f"x-request-id: n{number}\r\n") for number in range(3)))
        for number in range(3):
            headers, body = await _answer(reader)
            assert headers["x-request-id"] == f"n{number}"
            assert headers["x-headgate-tier"] == "local"
            assert "date" in headers
            assert body["object"] == "chat.completion"
        writer.write(_request())
        assert "connection" not in (await _answer(reader))[0]
        writer.close()
        await writer.wait_closed()


async def test_connection_is_closed_on_request(tmp_path: Path) -> None:
    async with FakeInference() as fake, Gateway(tmp_path, fake.url) as gateway:
        for request in (_request("1.0"), _request(more="connection: close\r\n")):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rsplit(":", 1)[1]))
            writer.write(request)
            assert (await _answer(reader))[0]["connection"] == "close"
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
