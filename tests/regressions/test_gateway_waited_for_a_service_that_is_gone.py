"""Whoever waited for a first word of our own service waited on although probes had found it gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.fake_provider import KEY as CLOUD_KEY
from tests.rigs.fake_provider import FakeProvider
from tests.rigs.gateway_rig import MESSAGES, Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(20)

CONFIG = """
providers:
  openai: {{kind: openai, api_key: "${{env:CLOUD}}", base_url: {url}/v1}}
routes:
  demo: {{chain: [local/demo, openai/gpt]}}
breaker: {{failures: 1}}
deadlines: {{first_token: 60s}}
"""


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_tier_is_asked_at_once(tmp_path: Path, stream: bool) -> None:
    async with (
        FakeInference("token") as fake,
        FakeProvider() as cloud,
        Gateway(tmp_path, fake.url, CONFIG.format(url=cloud.url), environ={"CLOUD": CLOUD_KEY}) as gateway,
    ):
        fake.answers["demo"] = Answer(stall_before_headers=True)
        body = {"model": "demo", "messages": MESSAGES, "stream": stream}
        asking = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=body))
        await until("the request is with the service", lambda: fake.seen)
        fake.ready = False
        gateway.runtime.prober.suspect()
        answer = await asking
        assert answer.status_code == 200
        assert answer.headers["x-headgate-model"] == "openai/gpt"
        assert answer.headers["x-headgate-reason"] == "timeout"
        await asyncio.wait_for(fake.seen[0].closed.wait(), 10)
