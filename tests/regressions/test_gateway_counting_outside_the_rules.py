"""Counts of tokens stood outside the rules for answers.

An open breaker kept no count from a cloud, the client's own timeout ended none, the time after which a cloud said to
come again was told as another one, and no record said whom a count had asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import parse
from gateway.endpoints.token_count_routes import _Counting
from gateway.errors import GatewayError
from gateway.routing.chain import RouteMatch
from gateway.routing.explain_record import Record
from gateway.routing.request_context import RequestContext
from inference.protocol import Code, ModelState
from tests.rigs.fake_inference import FakeInference
from tests.rigs.fake_provider import KEY as CLOUD_KEY
from tests.rigs.fake_provider import FakeProvider
from tests.rigs.gateway_rig import MESSAGES, Gateway

pytestmark = pytest.mark.timeout(60)

CONFIG = """
providers:
  anthropic: {{kind: anthropic, api_key: "${{env:CLOUD}}", base_url: {url}}}
routes:
  away: {{chain: [anthropic/fault-503]}}
  spare: {{chain: [anthropic/fault-503, local/demo]}}
  throttled: {{chain: [anthropic/fault-429=60]}}
  cloudy: {{chain: [local/demo, anthropic/claude-opus-5]}}
  alone: {{chain: [local/demo]}}
breaker: {{failures: 1}}
"""


@pytest.fixture
async def fake() -> AsyncIterator[FakeInference]:
    async with FakeInference("token") as fake:
        fake.counts["demo"] = 42
        yield fake


@pytest.fixture
async def cloud() -> AsyncIterator[FakeProvider]:
    async with FakeProvider() as cloud:
        yield cloud


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference, cloud: FakeProvider) -> AsyncIterator[Gateway]:
    config = CONFIG.format(url=cloud.url)
    async with Gateway(tmp_path, fake.url, config, {"CLOUD": CLOUD_KEY}) as gateway:
        await gateway.look()
        yield gateway


async def count(gateway: Gateway, model: str, headers: dict[str, str] | None = None) -> httpx2.Response:
    body = {"model": model, "messages": MESSAGES}
    return await gateway.client.post("/v1/messages/count_tokens", json=body, headers=headers or {})


async def record_of(gateway: Gateway, answer: httpx2.Response) -> dict[str, Any]:
    found = await gateway.admin("GET", f"/admin/requests/{answer.headers['x-request-id']}")
    record: dict[str, Any] = found.json()
    return record


async def test_a_tier_that_failed_lately_is_not_asked_to_count(gateway: Gateway, cloud: FakeProvider) -> None:
    assert (await gateway.chat("away")).status_code == 503
    asked = len(cloud.records)
    refused = await count(gateway, "away")
    assert refused.status_code == 503
    assert 20 < int(refused.headers["retry-after"]) <= 30
    assert (await record_of(gateway, refused))["outcome"] == "no_tier_available"
    counted = await count(gateway, "spare")
    assert (counted.json()["input_tokens"], counted.headers["x-headgate-reason"]) == (42, "breaker_open")
    record = await record_of(gateway, counted)
    assert (record["answered_by"], record["endpoint"]) == ("local/demo", "/v1/messages/count_tokens")
    assert [tried["name"] for tried in record["attempts"]] == ["local/demo"]
    assert len(cloud.records) == asked


async def test_the_time_that_a_cloud_named_is_told_and_no_breaker_moves(gateway: Gateway) -> None:
    refused = await count(gateway, "throttled")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "60")
    assert (await gateway.breaker("anthropic/fault-429=60"))["state"] == "closed"


async def test_the_callers_own_time_ends_a_count_and_is_shared_between_the_tiers(
    gateway: Gateway, fake: FakeInference
) -> None:
    fake.count_hold = asyncio.Event()
    late = await count(gateway, "alone", {"x-stainless-read-timeout": "0.4"})
    assert (late.status_code, late.json()["error"]["type"]) == (504, "timeout_error")
    assert "the client's own timeout" in late.json()["error"]["message"]
    assert late.headers["x-should-retry"] == "false"
    shared = await count(gateway, "cloudy", {"x-stainless-read-timeout": "4"})
    assert (shared.status_code, shared.headers["x-headgate-model"]) == (200, "anthropic/claude-opus-5")
    assert shared.headers["x-headgate-reason"] == "timeout"


async def test_a_model_without_room_is_counted_for(gateway: Gateway, fake: FakeInference) -> None:
    """Counting takes no memory. Where somebody else would answer, that one's count is the true one."""
    fake.models["demo"] = replace(fake.models["demo"], fits=False, reason="no room")
    await gateway.look()
    assert (await count(gateway, "alone")).json()["input_tokens"] == 42
    assert (await count(gateway, "cloudy")).headers["x-headgate-model"] == "anthropic/claude-opus-5"


async def test_a_count_goes_past_a_model_that_ails(gateway: Gateway, fake: FakeInference) -> None:
    """Nothing was on record of a tier that was put behind the others, and the count ended in a defect."""
    fake.models["demo"] = replace(fake.models["demo"], state=ModelState.FAILED)
    await gateway.look()
    counted = await count(gateway, "cloudy")
    assert (counted.status_code, counted.headers["x-headgate-reason"]) == (200, "unhealthy")
    assert (await record_of(gateway, counted))["answered_by"] == "anthropic/claude-opus-5"


async def test_a_refused_count_tells_how_many_were_asked(gateway: Gateway) -> None:
    refused = await count(gateway, "away")
    assert (refused.status_code, refused.headers["x-headgate-attempts"]) == (503, "1")


async def test_who_waited_at_the_door_until_its_time_was_over_ran_out_of_time(gateway: Gateway) -> None:
    runtime = gateway.runtime
    record, found = Record("id", 0.0, "/"), RouteMatch("alone", "demo")
    asked = parse(Endpoint.CHAT, b'{"model":"alone","messages":[{"role":"user","content":"x"}]}')
    counting = _Counting(
        runtime.gateway_state, asked, found, RequestContext("id", silence_seconds=1.0), record, waited=1.0
    )
    with pytest.raises(GatewayError) as caught:
        await counting.result()
    assert (caught.value.status, caught.value.code) == (504, Code.DEADLINE_EXCEEDED)
    assert "not tried" in record.dropped["local/demo"]
