"""While the probe of a half-open breaker streamed its answer, all other requests went to the next tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.protocol import Code
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import CONFIG, MESSAGES, Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)

NO_RESUME = CONFIG.replace("demo-mini]}", "demo-mini], resume: off}")


async def test_requests_pass_after_first_token_of_streamed_probe(
    tmp_path: Path,
) -> None:
    async with (
        FakeInference("token") as fake,
        Gateway(tmp_path, fake.url, NO_RESUME + "breaker: {open: 200ms}\n") as gateway,
    ):
        fake.queue["demo"] = [Answer(refuse=Code.MODEL_FAILED)] * 5
        for _ in range(5):
            assert (await gateway.chat()).json()["model"] == "demo-mini"
        await until("the open period is over", lambda: gateway.runtime.breakers.open_for("local", "demo") is None)
        fake.queue["demo"] = [Answer(words=("word ",) * 20, pause=0.05, error=Code.DEVICE_LOST)]
        body = {"model": "demo", "messages": MESSAGES, "stream": True}
        async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as probe:
            assert (await gateway.breaker("local/demo"))["state"] == "closed"
            assert (await gateway.chat()).json()["model"] == "demo"
            text = "".join([piece async for piece in probe.aiter_text()])
        assert '"error"' in text
        entry = await gateway.breaker("local/demo")
        assert (entry["state"], entry["failures"]) == ("closed", 1)
