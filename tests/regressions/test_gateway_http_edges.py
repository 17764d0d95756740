"""Requests at the edge of HTTP once got plain text without an id, or were judged by the last of two headers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.protocol import Code, ModelState, ModelStatus
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import KEY, Gateway
from tests.rigs.stack import until


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url) as gateway:
        yield gateway


async def _raw(gateway: Gateway, request: str) -> tuple[str, dict[str, object]]:
    """The answer's head and its JSON body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(request.replace("\n", "\r\n").encode())
    async with asyncio.timeout(5):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.decode().partition("\r\n\r\n")
    return head, json.loads(body)["error"]


@pytest.mark.parametrize(
    "request_text",
    [
        "NONSENSE / HTTP/1.1\nHost: localhost\n\n",
        "GET /livez HTTP/1.1\nHost: localhost\nContent-Length: 1\nContent-Length: 2\n\n",
        "\x16\x03\x01\x02\n\n",
    ],
)
async def test_what_is_no_http_gets_the_envelope_and_an_id(gateway: Gateway, request_text: str) -> None:
    head, error = await _raw(gateway, request_text)
    assert head.startswith("HTTP/1.1 400 ")
    assert "x-request-id: req_" in head
    assert "x-headgate-tier: none" in head
    assert error["code"] == "invalid_request"


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("host", "evil.example", "127.0.0.1"),
        ("authorization", f"Bearer {KEY}", "Bearer wrong"),
        ("x-api-key", KEY, KEY),
    ],
)
async def test_a_header_that_decides_over_access_may_come_once(
    gateway: Gateway, name: str, first: str, second: str
) -> None:
    host = "" if name == "host" else "Host: localhost\n"
    head, error = await _raw(
        gateway, f"GET /v1/models HTTP/1.1\n{host}{name}: {first}\n{name}: {second}\nConnection: close\n\n"
    )
    assert head.startswith("HTTP/1.1 400 ")
    assert error["param"] == name


async def test_full_queues_everywhere_are_a_429_and_not_an_outage(gateway: Gateway, fake: FakeInference) -> None:
    full = Answer(refuse=Code.QUEUE_FULL, retry_after=3)
    fake.answers = {"demo": full, "demo-mini": full}
    for _ in range(2):
        answer = await gateway.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert answer.headers["retry-after"] in {"2", "3"}


async def test_a_missing_capability_names_the_parameter_that_asks_for_it(gateway: Gateway, fake: FakeInference) -> None:
    fake.models["plain"] = ModelStatus(id="plain", state=ModelState.READY, capabilities=("chat",))
    await until("the model is known", lambda: gateway.runtime.view.models.get("plain"))
    tools = [{"type": "function", "function": {"name": "read_gauge"}}]
    answer = await gateway.chat("plain", tools=tools)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
