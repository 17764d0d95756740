"""Counting for a client that had left went on for up to half a minute, and kept its place at the door all the time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import MESSAGES, Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)


async def _counting(gateway: Gateway, fake: FakeInference) -> asyncio.Task[int]:
    body = {"model": "demo", "messages": MESSAGES}

    async def ask() -> int:
        return (await gateway.client.post("/v1/messages/count_tokens", json=body)).status_code

    asking = asyncio.create_task(ask())
    await until("it is counted", lambda: fake.counted)
    assert gateway.runtime.admission.in_flight == 1
    return asking


async def test_the_place_is_free_when_the_client_left(tmp_path: Path) -> None:
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url) as gateway:
        fake.count_hold = asyncio.Event()
        asking = await _counting(gateway, fake)
        asking.cancel()
        await until("its place is free", lambda: not gateway.runtime.admission.in_flight)


async def test_a_gateway_that_stops_says_so(tmp_path: Path) -> None:
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url) as gateway:
        fake.count_hold = asyncio.Event()
        asking = await _counting(gateway, fake)
        gateway.runtime.presences.interrupt_all()
        assert await asking == 503
