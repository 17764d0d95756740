"""Breakers outlived their provider when a reload removed it or changed its key or address."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.breaker.breakers import Breakers, Lease
from gateway.breaker.outcome import Failure, Ignore, Reason, Scope, Success, Verdict
from gateway.breaker.permits import Rule, State
from inference.protocol import Code
from tests.rigs.breaker_rig import FakeActivity
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.fake_provider.faults import Fault
from tests.rigs.fake_provider.server import FakeProvider
from tests.rigs.gateway_rig import Gateway
from tests.rigs.stack import until

FULL = Ignore(Reason.QUEUE_FULL, 60.0, frozenset({"normal"}))
CLOUD = """
providers: {{openai: {{kind: openai, api_key: {key}, base_url: "{url}"}}}}
routes:
  demo: {{chain: [openai/gpt-test, local/demo]}}
deadlines: {{connect: {connect}s}}
"""
LOCAL_ONLY = "routes: {demo: {chain: [local/demo]}}"


async def _known(gateway: Gateway) -> set[str]:
    return {breaker["name"] for breaker in (await gateway.admin("GET", "/admin/breakers")).json()["breakers"]}


def _config(cloud: FakeProvider, **more: Any) -> str:
    return CLOUD.format(**{"key": "fake-openai", "url": cloud.openai_url, "connect": 5, **more})


async def test_removed_provider_is_not_reported_as_failing(tmp_path: Path) -> None:
    async with FakeInference() as fake, FakeProvider() as cloud, Gateway(tmp_path, fake.url, _config(cloud)) as gateway:
        cloud.faults.add(Fault("status", status=429, retry_after=3600))
        assert (await gateway.chat()).json()["model"] == "demo"
        assert (await gateway.client.get("/health")).json()["breakers_not_closed"] == ["openai/gpt-test"]

        gateway.write(LOCAL_ONLY)
        assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
        assert (await gateway.client.get("/health")).json()["status"] == "ok"
        assert await _known(gateway) == {"local", "local/demo"}
        assert 'gateway_breaker_state{model="gpt-test"' not in (await gateway.client.get("/metrics")).text


@pytest.mark.parametrize("change", ["key", "connect"])
async def test_changed_provider_starts_with_closed_breakers(tmp_path: Path, change: str) -> None:
    async with FakeInference() as fake, FakeProvider() as cloud, Gateway(tmp_path, fake.url, _config(cloud)) as gateway:
        cloud.faults.add(Fault("status", status=429, retry_after=3600))
        assert (await gateway.chat()).json()["model"] == "demo"

        gateway.write(_config(cloud, **{change: {"key": "fake-openai-2", "connect": 4}[change]}))
        assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
        state = (await gateway.breaker("openai/gpt-test"))["state"]
        assert state == ("closed" if change == "key" else "open"), "a changed deadline is not another provider"


async def test_changed_inference_service_is_used_at_once(tmp_path: Path) -> None:
    async with FakeInference() as fake, FakeInference() as other, Gateway(tmp_path, fake.url, LOCAL_ONLY) as gateway:
        fake.answers["demo"] = Answer(refuse=Code.MODEL_FAILED)
        for _ in range(5):
            assert (await gateway.chat()).status_code == 503
        assert (await gateway.breaker("local/demo"))["state"] == "open"

        gateway.environ["GATEWAY_INFERENCE__URL"] = other.url
        assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
        assert (await gateway.chat()).status_code == 200
        assert len(other.seen) == 1


@pytest.mark.parametrize("verdict", [FULL, Failure(Scope.PAIR, 3600.0, opens=True), Success()])
def test_attempts_at_replaced_provider_change_nothing(caplog: pytest.LogCaptureFixture, verdict: Verdict) -> None:
    failures: list[str] = []
    breakers = Breakers(Rule(), on_failure=lambda provider, model, failure: failures.append(provider))
    before = breakers.generation
    running = breakers.acquire("openai", "gpt-test", 1e9, generation=before)
    breakers.skip("openai", "gpt-test", 60.0, ["normal"])
    breakers.forget("openai")
    later = breakers.acquire("openai", "gpt-test", 1e9, generation=before)
    for lease in (running, later):
        assert isinstance(lease, Lease)
        lease.first_byte(FakeActivity())
        lease.first_token()
        with lease.cancelled_when_down(lambda: None):
            lease.settle(verdict)
        lease.release()
    assert breakers.skipped_for("openai", "gpt-test") is None
    assert (breakers.states(), failures, caplog.records) == ({}, [], [])

    now = breakers.acquire("openai", "gpt-test", 1e9, generation=breakers.generation)
    assert isinstance(now, Lease)
    now.settle(Failure(Scope.PAIR, 3600.0, opens=True))
    assert (breakers.states()["openai/gpt-test"], failures) == (State.OPEN, ["openai"])


async def test_waiting_request_uses_replaced_provider_without_recording(tmp_path: Path) -> None:
    """It began before the reload and uses the earlier key: the answer does not concern the new account."""
    gate = asyncio.Event()
    async with FakeInference() as fake, FakeProvider() as cloud:
        slow = "routes:\n  slow: {chain: [local/demo]}"
        config = _config(cloud).replace("routes:", slow) + "admission: {max_in_flight: 1}\n"
        async with Gateway(tmp_path, fake.url, config) as gateway:
            fake.queue["demo"] = [Answer(hold=gate)]
            first = asyncio.create_task(gateway.chat("slow"))
            await until("the first is inside", lambda: fake.seen)
            second = asyncio.create_task(gateway.chat("demo"))
            depth = "gateway_queue_depth 1.0"
            await until("the second waits", lambda: depth in gateway.runtime.telemetry.render().decode())
            gateway.write(config.replace("api_key: fake-openai", "api_key: fake-openai-2"))
            assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
            cloud.faults.add(Fault("status", status=429, retry_after=3600))
            gate.set()
            assert [(await one).json()["model"] for one in (first, second)] == ["demo", "demo"]
            sent = {name.lower(): value for name, value in (await cloud.record()).headers.items()}
            assert sent["authorization"] == "Bearer fake-openai"
            assert (await gateway.breaker("openai/gpt-test"))["state"] == "closed"
