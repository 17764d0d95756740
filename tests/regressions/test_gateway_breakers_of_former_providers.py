"""Breakers outlived the provider that they were about: one that a reload took away, or gave another key or address."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference.protocol import Code
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.fake_provider.faults import Fault
from tests.rigs.fake_provider.server import FakeProvider
from tests.rigs.gateway_rig import Gateway

CLOUD = """
providers: {{openai: {{kind: openai, api_key: {key}, base_url: "{url}"}}}}
routes:
  demo: {{chain: [openai/gpt-test, local/demo]}}
deadlines: {{connect: {connect}s}}
"""
LOCAL_ALONE = "routes: {demo: {chain: [local/demo]}}"


async def _known(gateway: Gateway) -> set[str]:
    return {breaker["name"] for breaker in (await gateway.admin("GET", "/admin/breakers")).json()["breakers"]}


def _config(cloud: FakeProvider, **more: Any) -> str:
    return CLOUD.format(**{"key": "fake-openai", "url": cloud.openai_url, "connect": 5, **more})


async def test_a_provider_that_left_is_no_ailment(tmp_path: Path) -> None:
    async with FakeInference() as fake, FakeProvider() as cloud, Gateway(tmp_path, fake.url, _config(cloud)) as gateway:
        cloud.faults.add(Fault("status", status=429, retry_after=3600))
        assert (await gateway.chat()).json()["model"] == "demo"
        assert (await gateway.client.get("/health")).json()["breakers_not_closed"] == ["openai/gpt-test"]

        gateway.write(LOCAL_ALONE)
        assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
        assert (await gateway.client.get("/health")).json()["status"] == "ok"
        assert await _known(gateway) == {"local", "local/demo"}
        assert 'gateway_breaker_state{model="gpt-test"' not in (await gateway.client.get("/metrics")).text


@pytest.mark.parametrize("change", ["key", "connect"])
async def test_another_key_is_another_account(tmp_path: Path, change: str) -> None:
    async with FakeInference() as fake, FakeProvider() as cloud, Gateway(tmp_path, fake.url, _config(cloud)) as gateway:
        cloud.faults.add(Fault("status", status=429, retry_after=3600))
        assert (await gateway.chat()).json()["model"] == "demo"

        gateway.write(_config(cloud, **{change: {"key": "fake-openai-2", "connect": 4}[change]}))
        assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
        state = (await gateway.breaker("openai/gpt-test"))["state"]
        assert state == ("closed" if change == "key" else "open"), "a deadline of ours is no other provider"


async def test_another_service_is_asked_at_once(tmp_path: Path) -> None:
    async with FakeInference() as fake, FakeInference() as other, Gateway(tmp_path, fake.url, LOCAL_ALONE) as gateway:
        fake.answers["demo"] = Answer(refuse=Code.MODEL_FAILED)
        for _ in range(5):
            assert (await gateway.chat()).status_code == 503
        assert (await gateway.breaker("local/demo"))["state"] == "open"

        gateway.environ["GATEWAY_INFERENCE__URL"] = other.url
        assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
        assert (await gateway.chat()).status_code == 200
        assert len(other.seen) == 1


async def test_who_still_asks_the_former_one_moves_nothing(tmp_path: Path) -> None:
    async with FakeInference() as fake, FakeProvider() as cloud, Gateway(tmp_path, fake.url, _config(cloud)) as gateway:
        breakers = gateway.runtime.breakers
        lease = breakers.acquire("openai", "gpt-test", 1e9)
        breakers.hold("openai", "gpt-test", 60.0, ["normal"])
        breakers.forget("openai")
        assert breakers.held_for("openai", "gpt-test") is None
        lease.release()  # type: ignore[union-attr]
        assert breakers.states() == {}
