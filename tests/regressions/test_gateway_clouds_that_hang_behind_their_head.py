"""A cloud that hung after its first byte or token got all requests until enough had timed out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.breaker.breakers import Lease
from gateway.breaker.silence import MIN_SAMPLES, SILENT_SECONDS
from tests.rigs.fake_inference import FakeInference
from tests.rigs.fake_provider import KEY as CLOUD_KEY
from tests.rigs.fake_provider import FakeProvider
from tests.rigs.fake_provider.faults import Fault
from tests.rigs.gateway_rig import Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)

FAILURES = 3
CONFIG = """
providers:
  one: {{kind: openai, api_key: "${{env:CLOUD}}", base_url: {url}/v1}}
  other: {{kind: anthropic, api_key: "${{env:CLOUD}}", base_url: {url}}}
routes:
  one: {{chain: [one/gpt, local/demo]}}
  other: {{chain: [other/claude, local/demo]}}
breaker: {{failures: {failures}}}
"""


async def test_next_tier_is_used_while_attempts_are_silent(tmp_path: Path) -> None:
    async with FakeInference("token") as fake, FakeProvider() as cloud:
        config = CONFIG.format(url=cloud.url, failures=FAILURES)
        await _check(Gateway(tmp_path, fake.url, config, {"CLOUD": CLOUD_KEY}), cloud)


async def _check(rig: Gateway, cloud: FakeProvider) -> None:
    async with rig as gateway:
        await gateway.look()
        names = ("one", "other")
        known = [gateway.chat(name, stream=True) for name in names for _ in range(MIN_SAMPLES)]
        assert all(answer.status_code == 200 for answer in await asyncio.gather(*known))
        cloud.faults.add(
            Fault("stall", after=0, count=None, model="gpt"), Fault("stall", after=2, count=None, model="claude")
        )
        waiting = [asyncio.create_task(gateway.chat(name, stream=True)) for name in names for _ in range(FAILURES)]
        await until("all requests arrived", lambda: len(cloud.records) >= 2 * (MIN_SAMPLES + FAILURES))
        await asyncio.sleep(SILENT_SECONDS + 1.0)
        for name in names:
            answer = await gateway.chat(name)
            assert answer.headers["x-headgate-model"] == "local/demo"
            record = (await gateway.admin("GET", f"/admin/requests/{answer.headers['x-request-id']}")).json()
            assert [tried["name"] for tried in record["attempts"]] == ["local/demo"]
            assert " keeps several waiting" in str(record)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        breakers = gateway.runtime.breakers
        running = [("one", "gpt"), ("other", "claude")]
        await until("they have ended", lambda: not any(breakers.outstanding(*pair) for pair in running))
        for pair in running:
            lease = breakers.acquire(*pair, expires=1e9)
            assert isinstance(lease, Lease), "ended attempts are not silent"
            lease.release()
