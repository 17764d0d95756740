"""A client that had sent its next request already and left was not seen to leave: its answer was written to nobody, and
with uvloop, where that raises, each such client counted as a failure of the model. Five of them opened its breaker. One
that waited for a whole answer was not even seen to leave before it was computed.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvloop

from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import KEY, MESSAGES, Gateway
from tests.rigs.stack import until


def _request(*, stream: bool) -> bytes:
    body = json.dumps({"model": "demo", "messages": MESSAGES, "stream": stream}).encode()
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


async def _leaves_with_a_request_behind_another(root: Path, *, stream: bool) -> None:
    async with FakeInference("token") as fake:
        fake.answers["demo"] = Answer(words=("word",) * 4000, pause=0.01)
        async with Gateway(root, fake.url) as gateway:
            where = urlsplit(gateway.url)
            client = socket.create_connection((where.hostname, where.port))
            client.sendall(_request(stream=stream))
            await until("the first answer began", lambda: fake.seen)
            client.sendall(_request(stream=stream))
            connections = gateway._server.server_state.connections
            await until("the second request waits", lambda: any(one.pipeline for one in connections))  # type: ignore[union-attr]
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            async with asyncio.timeout(10):
                await fake.seen[0].closed.wait()
            await until("its place is free", lambda: gateway.runtime.admission.in_flight == 0)
            assert (await gateway.breaker("local/demo"))["failures"] == 0
            assert len(fake.seen) == 1


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_the_answer_ends_and_nobody_is_blamed(tmp_path: Path, loop: object, stream: bool) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:  # type: ignore[arg-type]
        runner.run(_leaves_with_a_request_behind_another(tmp_path, stream=stream))
