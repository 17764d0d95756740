"""A 429 of our own service closed the model to all requests, also to those for whom there was room."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.protocol import Code, Priority
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import Gateway


async def _answered_by(gateway: Gateway, priority: str) -> str:
    answer = await gateway.chat(headers={"x-headgate-priority": priority})
    return str(answer.json()["model"])


async def test_a_flood_of_one_priority_leaves_the_others_alone(tmp_path: Path) -> None:
    async with FakeInference() as fake, Gateway(tmp_path, fake.url) as gateway:
        fake.queue["demo"] = [Answer(refuse=Code.QUEUE_FULL, retry_after=60, full_for=("low",))]
        assert await _answered_by(gateway, "low") == "demo-mini"
        assert [await _answered_by(gateway, priority) for priority in Priority] == ["demo", "demo", "demo-mini"]
        assert len(fake.seen_for("demo")) == 3, "who comes with the same priority is not sent in vain"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_one_request_says_nothing_to_others(tmp_path: Path, stream: bool) -> None:
    async with FakeInference() as fake, Gateway(tmp_path, fake.url, "routes: {demo: {chain: [local/demo]}}") as gateway:
        fake.queue["demo"] = [Answer(refuse=Code.QUEUE_FULL, retry_after=5, message="this model prepares other forms")]
        refused = await gateway.chat(stream=stream)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert (await gateway.chat(stream=stream)).status_code == 200
