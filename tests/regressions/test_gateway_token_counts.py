"""Token counts follow the rules for answers: breakers, timeouts, records."""

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
from gateway.breaker import probe_schedule
from gateway.breaker.probe_schedule import ProbeKind
from gateway.endpoints import token_count_routes
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
from tests.rigs.stack import until

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
  twice: {{chain: [local/demo, local/demo-mini]}}
breaker: {{failures: 1}}
"""


@pytest.fixture
async def fake() -> AsyncIterator[FakeInference]:
    async with FakeInference("token") as fake:
        fake.counts["demo"] = 42
        yield fake


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


async def test_tier_with_an_open_breaker_counts_no_tokens(gateway: Gateway, cloud: FakeProvider) -> None:
    assert (await gateway.chat("away")).status_code == 503
    requests = len(cloud.records)
    refused = await count(gateway, "away")
    assert refused.status_code == 503
    assert 20 < int(refused.headers["retry-after"]) <= 30
    assert (await record_of(gateway, refused))["outcome"] == "no_tier_available"
    counted = await count(gateway, "spare")
    assert (counted.json()["input_tokens"], counted.headers["x-headgate-reason"]) == (42, "breaker_open")
    record = await record_of(gateway, counted)
    assert (record["answered_by"], record["endpoint"]) == ("local/demo", "/v1/messages/count_tokens")
    assert [tried["name"] for tried in record["attempts"]] == ["local/demo"]
    assert len(cloud.records) == requests


async def test_retry_after_of_a_cloud_is_passed_on_and_opens_no_breaker(gateway: Gateway) -> None:
    refused = await count(gateway, "throttled")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "60")
    assert (await gateway.breaker("anthropic/fault-429=60"))["state"] == "closed"


async def test_client_timeout_ends_a_count_and_is_divided_between_the_tiers(
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


async def test_tokens_are_counted_for_a_model_that_does_not_fit_only_without_another_tier(
    gateway: Gateway, fake: FakeInference
) -> None:
    """Counting needs no memory. With another tier, the count of the model that would answer is the right one."""
    fake.models["demo"] = replace(fake.models["demo"], fits=False, reason="no room")
    await gateway.look()
    assert (await count(gateway, "alone")).json()["input_tokens"] == 42
    assert (await count(gateway, "cloudy")).headers["x-headgate-model"] == "anthropic/claude-opus-5"


async def test_count_skips_the_other_models_of_a_service_that_probes_find_down(
    gateway: Gateway, fake: FakeInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The breaker opens while the first model is asked; the second one would take as long."""
    monkeypatch.setattr(token_count_routes, "SECONDS", 2.0)
    monkeypatch.setitem(probe_schedule.TIMEOUT_SECONDS, ProbeKind.READY, 0.1)  # type: ignore[arg-type]
    fake.count_hold = asyncio.Event()
    counting = asyncio.create_task(count(gateway, "twice"))
    await until("the count runs", lambda: fake.counted)
    fake.is_silent = True
    gateway.runtime.inference.node().prober.suspect()
    refused = await counting
    assert refused.status_code == 503
    record = await record_of(gateway, refused)
    assert [tried["name"] for tried in record["attempts"]] == ["local/demo"]
    assert record["dropped"]["local/demo-mini"].startswith("breaker_open: ")
    assert len(fake.counted) == 1


async def test_count_skips_an_unhealthy_model(gateway: Gateway, fake: FakeInference) -> None:
    fake.models["demo"] = replace(fake.models["demo"], state=ModelState.FAILED)
    await gateway.look()
    counted = await count(gateway, "cloudy")
    assert (counted.status_code, counted.headers["x-headgate-reason"]) == (200, "unhealthy")
    assert (await record_of(gateway, counted))["answered_by"] == "anthropic/claude-opus-5"


async def test_refused_count_has_the_number_of_attempts(gateway: Gateway) -> None:
    refused = await count(gateway, "away")
    assert (refused.status_code, refused.headers["x-headgate-attempts"]) == (503, "1")


async def test_count_that_used_up_its_time_in_the_queue_is_504(gateway: Gateway) -> None:
    runtime = gateway.runtime
    record, found = Record("id", 0.0, "/"), RouteMatch("alone", "demo")
    request = parse(Endpoint.CHAT, b'{"model":"alone","messages":[{"role":"user","content":"x"}]}')
    counting = _Counting(
        runtime.gateway_state, request, found, RequestContext("id", silence_seconds=1.0), record, waited=1.0
    )
    with pytest.raises(GatewayError) as caught:
        await counting.result()
    assert (caught.value.status, caught.value.code) == (504, Code.DEADLINE_EXCEEDED)
    assert "not tried" in record.dropped["local/demo"]


async def _counting(gateway: Gateway, fake: FakeInference) -> asyncio.Task[int]:
    body = {"model": "demo", "messages": MESSAGES}

    async def ask() -> int:
        return (await gateway.client.post("/v1/messages/count_tokens", json=body)).status_code

    counting = asyncio.create_task(ask())
    await until("the count runs", lambda: fake.counted)
    assert gateway.runtime.admission.in_flight == 1
    return counting


async def test_count_of_a_disconnected_client_frees_its_slot(tmp_path: Path) -> None:
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url) as gateway:
        fake.count_hold = asyncio.Event()
        counting = await _counting(gateway, fake)
        counting.cancel()
        await until("its slot is free", lambda: not gateway.runtime.admission.in_flight)


async def test_count_is_503_when_the_gateway_stops(tmp_path: Path) -> None:
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url) as gateway:
        fake.count_hold = asyncio.Event()
        counting = await _counting(gateway, fake)
        gateway.runtime.open_requests.interrupt_all()
        assert await counting == 503
