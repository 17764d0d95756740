"""A request larger than an account's tokens per minute was a failure of the cloud itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.rigs.fake_inference import FakeInference
from tests.rigs.fake_provider import KEY, FakeProvider, Fault
from tests.rigs.gateway_rig import Gateway

CONFIG = """
providers: {{openai: {{kind: openai, api_key: {key}, base_url: "{url}"}}}}
routes:
  demo: {{chain: [openai/gpt-test, local/demo]}}
  alone: {{chain: [openai/gpt-test]}}
"""


@pytest.fixture
async def cloud() -> AsyncIterator[FakeProvider]:
    async with FakeProvider() as cloud:
        yield cloud


@pytest.fixture
async def gateway(tmp_path: Path, cloud: FakeProvider) -> AsyncIterator[Gateway]:
    config = CONFIG.format(key=KEY, url=cloud.openai_url)
    async with FakeInference() as fake, Gateway(tmp_path, fake.url, config) as gateway:
        yield gateway


@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_the_next_tiers_and_closes_the_cloud_to_nobody(
    gateway: Gateway, cloud: FakeProvider, stream: bool
) -> None:
    cloud.faults.add(Fault("too_large", count=6))
    for _ in range(6):
        answer = await gateway.chat(stream=stream)
        assert answer.headers["x-headgate-model"] == "local/demo"
        assert answer.headers["x-headgate-reason"] == "request_too_large"
    breaker = await gateway.breaker("openai/gpt-test")
    assert (breaker["state"], breaker["window"]["failed"]) == ("closed", 0)
    assert (await gateway.chat(stream=stream)).headers["x-headgate-model"] == "openai/gpt-test"


async def test_without_another_tier_the_caller_reads_the_clouds_words(gateway: Gateway, cloud: FakeProvider) -> None:
    cloud.faults.add(Fault("too_large"))
    answer = await gateway.chat("alone")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (413, "request_too_large")
    assert error["message"].startswith("Request too large for")
    assert answer.headers["x-should-retry"] == "false"
