"""A reload that took a route away failed the requests that waited at the door for it: a KeyError, told as a 500."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)

BEFORE = """
routes:
  demo: {chain: [local/demo]}
admission: {max_in_flight: 1}
"""
AFTER = BEFORE.replace("demo:", "other:")


async def test_who_waits_is_served_by_the_route_it_found(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url, BEFORE) as gateway:
        fake.answers["demo"] = Answer(hold=gate)
        first = asyncio.create_task(gateway.chat())
        await until("the first is inside", lambda: fake.seen)
        second = asyncio.create_task(gateway.chat())
        depth = "gateway_queue_depth 1.0"
        await until("the second waits", lambda: depth in gateway.runtime.telemetry.render().decode())
        gateway.write(AFTER)
        assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
        gate.set()
        assert [(await one).status_code for one in (first, second)] == [200, 200]
        assert (await gateway.chat()).status_code == 404
