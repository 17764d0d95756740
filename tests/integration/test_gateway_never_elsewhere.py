"""Client errors and refusals of a model are not sent to another tier."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.protocol import Code
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.fake_provider import KEY, FakeProvider, Fault
from tests.rigs.fake_provider.answers import Answer as CloudAnswer
from tests.rigs.gateway_rig import Gateway

pytestmark = pytest.mark.timeout(60)

CONFIG = """
providers:
  openai: {{kind: openai, api_key: {key}, base_url: {url}/v1}}
  google: {{kind: openai, api_key: {key}, base_url: {url}/v1beta/openai/}}
  anthropic: {{kind: anthropic, api_key: {key}, base_url: {url}}}
routes:
  local: {{chain: [local/demo, openai/next]}}
  openai: {{chain: [openai/first, anthropic/next, local/demo]}}
  google: {{chain: [google/first, openai/next, local/demo]}}
  anthropic: {{chain: [anthropic/first, openai/next, local/demo]}}
"""
CLOUDS = ("openai", "google", "anthropic")


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference, cloud: FakeProvider) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url, CONFIG.format(url=cloud.url, key=KEY)) as gateway:
        yield gateway


@pytest.mark.parametrize("stream", [False, True])
async def test_client_error_is_not_sent_to_another_tier(
    gateway: Gateway, fake: FakeInference, cloud: FakeProvider, stream: bool
) -> None:
    faults = [Fault("status", 400), Fault("status", 422), Fault("status", 413), Fault("content_policy")]
    for provider in CLOUDS:
        for fault in faults:
            cloud.faults.add(fault)
            answer = await gateway.chat(provider, stream=stream)
            status = 400 if fault.kind == "content_policy" else fault.status
            assert (answer.status_code, answer.headers["x-headgate-attempts"]) == (status, "1"), (provider, fault)
            assert answer.json()["error"]["message"]
            assert answer.headers["x-headgate-tier"] == "none"
        assert (await gateway.breaker(f"{provider}/first"))["failures"] == 0
    for code in (Code.INVALID_REQUEST, Code.POISON_REQUEST):
        fake.answers["demo"] = Answer(refuse=code)
        answer = await gateway.chat("local", stream=stream)
        status = 422 if code is Code.POISON_REQUEST else 400
        assert (answer.status_code, answer.headers["x-headgate-attempts"]) == (status, "1")
    assert {record.body["model"] for record in cloud.records} == {"first"}
    assert len(fake.seen) == 2


@pytest.mark.parametrize("refusal", ["", "I will not"])
async def test_refusal_of_a_model_is_an_answer(
    gateway: Gateway, fake: FakeInference, cloud: FakeProvider, refusal: str
) -> None:
    """Including a refusal without text."""
    cloud.answers.set(CloudAnswer(text="", refusal=refusal, stop="content_filter"))
    for provider in CLOUDS:
        whole = await gateway.chat(provider)
        assert (whole.status_code, whole.headers["x-headgate-model"]) == (200, f"{provider}/first")
        assert whole.json()["choices"][0]["finish_reason"] == "content_filter"
        streamed = await gateway.chat(provider, stream=True)
        assert streamed.headers["x-headgate-model"] == f"{provider}/first"
        assert '"finish_reason":"content_filter"' in streamed.text.replace(" ", "")
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert (await gateway.breaker(f"{provider}/first"))["failures"] == 0
    assert {record.body["model"] for record in cloud.records} == {"first"}
    assert fake.seen == []
