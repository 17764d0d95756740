"""The header that tells the gateway's own time counted the tiers' time too when every tier refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from inference.protocol import Code
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import Gateway

SECONDS = 0.6


@pytest.mark.parametrize("stream", [False, True])
async def test_the_time_of_tiers_that_refuse_is_not_the_gateways(tmp_path: Path, stream: bool) -> None:
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url) as gateway:
        slow = Answer(comments=2, pause=SECONDS / 2, words=(), error=Code.MODEL_FAILED)
        fake.answers = {"demo": slow, "demo-mini": slow}
        began = time.monotonic()
        answer = await gateway.chat(stream=stream)
        elapsed = time.monotonic() - began
        assert answer.status_code == 503
        assert float(answer.headers["x-headgate-overhead-ms"]) / 1000 <= elapsed - SECONDS
