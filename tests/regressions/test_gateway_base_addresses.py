"""Base addresses as users write them: with `/v1` for clients that add it themselves, with a slash at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import httpx2
import pytest

from gateway.http.middleware import canonical_path
from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import KEY, MESSAGES, Gateway

pytestmark = pytest.mark.timeout(60)

VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("path", "meant"),
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
def test_the_meant_path_has_one_version_and_no_slash_at_the_end(path: str, meant: str) -> None:
    assert canonical_path(path) == meant


@pytest.mark.parametrize("base", ["", "/", "/v1", "/v1/"])
async def test_anthropic_client_works_with_every_base_address(gateway: Gateway, base: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=gateway.url + base, api_key=KEY, max_retries=0) as client:
        said = await client.messages.create(model="demo", max_tokens=9, messages=[{"role": "user", "content": "Hi"}])
        assert said.content[0].type == "text"
        listed = [model.id async for model in client.models.list()]
        assert "demo" in listed


@pytest.mark.parametrize("path", ["/v1/v1/chat/completions", "/v1/chat/completions/", "//v1/chat/completions"])
async def test_openai_paths_work_with_every_base_address(gateway: Gateway, path: str) -> None:
    answer = await gateway.client.post(gateway.url + path, json={"model": "demo", "messages": MESSAGES})
    assert (answer.status_code, answer.json()["object"]) == (200, "chat.completion")
    assert (await gateway.client.get("/v1/v1/models/")).status_code == 200


async def test_errors_on_such_paths_have_the_envelope_of_the_client(gateway: Gateway) -> None:
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
    openais = await client.get("/v1/v1/nothing")
    assert (openais.status_code, openais.json()["error"]["code"]) == (404, "not_found")
