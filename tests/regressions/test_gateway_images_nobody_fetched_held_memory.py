"""Requests that named images held room for the largest there may be, before any came and where none is fetched."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from inference.protocol import ModelState, ModelStatus
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import CONFIG, Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)

URLS = [{"type": "image_url", "image_url": {"url": f"https://mill.example/{number}"}} for number in range(4)]


@pytest.mark.parametrize("hosts", ["[]", "[mill.example]"])
async def test_who_waits_with_addresses_holds_nothing(tmp_path: Path, hosts: str) -> None:
    config = f"{CONFIG}\nadmission: {{max_in_flight: 1}}\nimages: {{hosts: {hosts}}}\n"
    gate = asyncio.Event()
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url, config) as gateway:
        fake.models["seer"] = ModelStatus(id="seer", state=ModelState.READY, capabilities=("chat", "vision"))
        fake.answers["demo"] = Answer(hold=gate)
        await gateway.look()
        first = asyncio.create_task(gateway.chat())
        await until("the first is inside", lambda: fake.seen)
        messages = [{"role": "user", "content": URLS}]
        others = [asyncio.create_task(gateway.chat("seer", messages=messages)) for _ in range(2)]
        depth = "gateway_queue_depth 2.0"
        await until("the others wait", lambda: depth in gateway.runtime.telemetry.render().decode())
        assert gateway.runtime.bodies.held_bytes == 0
        for other in others:
            other.cancel()
        gate.set()
        assert (await first).status_code == 200
