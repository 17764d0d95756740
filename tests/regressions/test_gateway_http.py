"""Paths, headers and HTTP versions as clients send them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import httpx2
import pytest

from gateway.http.middleware import canonical_path
from inference.protocol import Code, ModelState, ModelStatus
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import KEY, MESSAGES, Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)

VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("path", "canonical"),
    [
        ("/v1/messages", "/v1/messages"),
        ("/v1/v1/messages", "/v1/messages"),
        ("//v1/messages", "/v1/messages"),
        ("/v1//messages/", "/v1/messages"),
        ("/v1/models/v1/v1", "/v1/models/v1/v1"),
        ("/v1/models/org/name", "/v1/models/org/name"),
        ("/v12/messages", "/v12/messages"),
        ("/livez/", "/livez"),
        ("/", "/"),
        ("//", "/"),
        ("", "/"),
    ],
)
def test_canonical_path_has_one_version_and_no_trailing_slash(path: str, canonical: str) -> None:
    assert canonical_path(path) == canonical


@pytest.mark.parametrize("base", ["", "/", "/v1", "/v1/"])
async def test_anthropic_client_works_with_every_base_address(gateway: Gateway, base: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=gateway.url + base, api_key=KEY, max_retries=0) as client:
        message = await client.messages.create(model="demo", max_tokens=9, messages=[{"role": "user", "content": "Hi"}])
        assert message.content[0].type == "text"
        assert "demo" in [model.id async for model in client.models.list()]


@pytest.mark.parametrize("path", ["/v1/v1/chat/completions", "/v1/chat/completions/", "//v1/chat/completions"])
async def test_openai_paths_work_with_every_base_address(gateway: Gateway, path: str) -> None:
    answer = await gateway.client.post(gateway.url + path, json={"model": "demo", "messages": MESSAGES})
    assert (answer.status_code, answer.json()["object"]) == (200, "chat.completion")
    assert (await gateway.client.get("/v1/v1/models/")).status_code == 200


async def test_errors_have_the_envelope_of_the_api_of_the_path(gateway: Gateway) -> None:
    client = gateway.client
    answers: list[httpx2.Response] = [
        await client.post("/v1/v1/messages", json={"model": "demo"}, headers=VERSION),
        await client.get("/v1/v1/messages/", headers=VERSION),
        await client.post("/v1/v1/messages/batches", json={}, headers=VERSION),
        await client.post("/messages", json={}, headers=VERSION),
        await client.get("/v1/files", headers=VERSION),
    ]
    assert [answer.status_code for answer in answers] == [400, 405, 404, 404, 404]
    for answer in answers:
        assert answer.json()["type"] == "error"
        assert answer.headers["request-id"] == answer.json()["request_id"]
    openai = await client.get("/v1/v1/nothing")
    assert (openai.status_code, openai.json()["error"]["code"]) == (404, "not_found")


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
async def test_invalid_http_gets_an_error_envelope_with_a_request_id(gateway: Gateway, request_text: str) -> None:
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
async def test_repeated_access_headers_are_refused(gateway: Gateway, name: str, first: str, second: str) -> None:
    host = "" if name == "host" else "Host: localhost\n"
    head, error = await _raw(
        gateway, f"GET /v1/models HTTP/1.1\n{host}{name}: {first}\n{name}: {second}\nConnection: close\n\n"
    )
    assert head.startswith("HTTP/1.1 400 ")
    assert error["param"] == name


async def test_full_queues_of_all_tiers_are_a_429(gateway: Gateway, fake: FakeInference) -> None:
    full = Answer(refuse=Code.QUEUE_FULL, retry_after=3)
    fake.answers = {"demo": full, "demo-mini": full}
    for _ in range(2):
        answer = await gateway.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert answer.headers["retry-after"] in {"2", "3"}


async def test_missing_capability_names_the_parameter_that_needs_it(gateway: Gateway, fake: FakeInference) -> None:
    fake.models["plain"] = ModelStatus(id="plain", state=ModelState.READY, capabilities=("chat",))
    await until("the model is known", lambda: gateway.runtime.view.models.get("plain"))
    tools = [{"type": "function", "function": {"name": "read_gauge"}}]
    answer = await gateway.chat("plain", tools=tools)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


async def _post_http10(gateway: Gateway, *, stream: bool) -> tuple[str, str]:
    """Head and body of the response, read until the gateway closes the connection."""
    body = json.dumps({"model": "demo", "stream": stream, "messages": [{"role": "user", "content": "hi"}]})
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    head = f"POST /v1/chat/completions HTTP/1.0\nHost: localhost\nx-api-key: {KEY}\nContent-Length: {len(body)}\n\n"
    writer.write(head.replace("\n", "\r\n").encode() + body.encode())
    async with asyncio.timeout(5):
        answer = (await reader.read()).decode()
    writer.close()
    head, _, rest = answer.partition("\r\n\r\n")
    return head, rest


async def test_http10_stream_is_not_chunked_and_ends_with_the_connection(gateway: Gateway) -> None:
    head, body = await _post_http10(gateway, stream=True)

    assert head.startswith("HTTP/1.1 200 ")
    assert "transfer-encoding" not in head
    assert "connection: close" in head
    frames = body.removesuffix("\n\n").split("\n\n")
    assert all(frame.startswith("data: ") for frame in frames)
    assert frames[-1] == "data: [DONE]"


async def test_http10_answer_has_a_content_length(gateway: Gateway) -> None:
    head, body = await _post_http10(gateway, stream=False)

    assert f"content-length: {len(body)}" in head
    assert json.loads(body)["object"] == "chat.completion"
