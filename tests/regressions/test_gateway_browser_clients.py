"""Clients in a web page: CORS headers and preflight requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from inference.protocol import Code
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import CONFIG, MESSAGES, Gateway

pytestmark = pytest.mark.timeout(60)

PAGE = "http://localhost:5173"
BODY = {"model": "demo", "messages": MESSAGES, "max_tokens": 9}


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url, CONFIG + f"cors: {{origins: ['{PAGE}']}}\n") as gateway:
        yield gateway


async def preflight(gateway: Gateway, path: str = "/v1/chat/completions", origin: str = PAGE) -> httpx2.Response:
    """The request that a browser sends before another one: without a key, with only these headers."""
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    async with httpx2.AsyncClient(base_url=gateway.url) as browser:
        return await browser.request("OPTIONS", path, headers=headers)


async def post(gateway: Gateway, path: str = "/v1/chat/completions", **body: Any) -> httpx2.Response:
    return await gateway.client.post(path, json={**BODY, **body}, headers={"origin": PAGE})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/v1/models"])
async def test_preflight_of_an_allowed_page_needs_no_key(gateway: Gateway, path: str) -> None:
    answer = await preflight(gateway, path)
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert {"authorization", "x-stainless-lang"} <= set(answer.headers["access-control-allow-headers"].split(", "))
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in answer.headers
    assert "Origin" in ", ".join(answer.headers.get_list("vary"))


async def test_preflight_of_another_page_names_the_setting(gateway: Gateway) -> None:
    answer = await preflight(gateway, origin="http://localhost:9999")
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
    assert "cors: {origins" in answer.json()["error"]["message"]


async def test_preflight_of_the_dashboard_is_refused_for_every_page(gateway: Gateway) -> None:
    answer = await preflight(gateway, "/ui/session")
    assert answer.status_code == 403
    assert answer.json()["error"]["message"] == "no other web page may call /ui"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_and_streams_can_be_read_by_the_page(gateway: Gateway, path: str, stream: bool) -> None:
    answer = await post(gateway, path, stream=stream)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    own = {name for name in answer.headers if name.startswith(("x-headgate-", "x-ratelimit-")) or "request-id" in name}
    assert own and own <= set(exposed)


async def test_errors_can_be_read_by_the_page(gateway: Gateway, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(refuse=Code.CONTEXT_LENGTH_EXCEEDED)
    async with httpx2.AsyncClient(base_url=gateway.url, headers={"origin": PAGE}) as page:
        no_key = await page.post("/v1/chat/completions", json=BODY)
    unknown = await gateway.client.get("/v1/nothing", headers={"origin": PAGE})
    wrong = await post(gateway, temperature="hot")
    refused = await post(gateway)
    listed = await gateway.client.get("/v1/models", headers={"origin": PAGE})
    answers = (no_key, unknown, wrong, refused, listed)
    assert [answer.status_code for answer in answers] == [401, 404, 400, 400, 200]
    assert [answer.headers.get("access-control-allow-origin") for answer in answers] == [PAGE] * 5


async def test_other_pages_and_other_programs_get_no_cors_headers(gateway: Gateway) -> None:
    for headers in ({"origin": "http://localhost:9999"}, {}):
        answer = await gateway.client.get("/v1/models", headers=headers)
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["vary"] == "Origin"


async def test_reload_changes_the_origins_and_turns_cors_off(gateway: Gateway) -> None:
    gateway.write(CONFIG + "cors: {origins: ['*']}\n")
    await gateway.runtime.reload()
    assert (await preflight(gateway, origin="https://a.test")).headers["access-control-allow-origin"] == "*"
    assert (await post(gateway, stream=True)).headers["access-control-allow-origin"] == "*"
    gateway.write(CONFIG)
    await gateway.runtime.reload()
    answer = await preflight(gateway)
    assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (403, False)
    answer = await post(gateway)
    assert not [name for name in answer.headers if name.startswith("access-control") or name == "vary"]


async def test_options_without_preflight_headers_is_refused(gateway: Gateway) -> None:
    answer = await gateway.client.request("OPTIONS", "/v1/models", headers={"origin": PAGE})
    assert answer.status_code == 405
