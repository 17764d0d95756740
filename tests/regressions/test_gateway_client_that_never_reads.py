"""A client that asked for a long answer and never read it once held its place, and the model's, until it went away."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

from gateway.http.connection_limits import BoundedHttp
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import KEY, MESSAGES, Gateway
from tests.rigs.stack import until

LONG = Answer(words=("x" * 65536,) * 400)


class _Impatient(BoundedHttp):
    unread_seconds = 0.3


async def test_the_place_is_free_again_and_nobody_is_blamed(tmp_path: Path) -> None:
    body = json.dumps({"model": "demo", "messages": MESSAGES, "stream": True}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    async with FakeInference("token") as fake:
        fake.answers["demo"] = LONG
        async with Gateway(tmp_path, fake.url, http=_Impatient) as gateway:
            where = urlsplit(gateway.url)
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect((where.hostname, where.port))
                client.sendall(head + body)
                await until("the answer began", lambda: fake.seen)
                await until("its place is free", lambda: gateway.runtime.admission.in_flight == 0)
                async with asyncio.timeout(10):
                    await fake.seen[0].closed.wait()
            assert (await gateway.breaker("local/demo"))["failures"] == 0


async def test_a_client_that_reads_slowly_but_reads_gets_everything(tmp_path: Path) -> None:
    answer = Answer(words=("x" * 65536,) * 60)
    async with FakeInference("token") as fake:
        fake.answers["demo"] = answer
        async with (
            Gateway(tmp_path, fake.url, http=_Impatient) as gateway,
            gateway.client.stream(
                "POST", "/v1/chat/completions", json={"model": "demo", "messages": MESSAGES, "stream": True}
            ) as response,
        ):
            seen = b""
            async for piece in response.aiter_raw():
                seen += piece
                await asyncio.sleep(0.002)
    assert seen.endswith(b"data: [DONE]\n\n")
