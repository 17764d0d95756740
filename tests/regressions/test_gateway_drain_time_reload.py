"""After a reload the server still cut open answers at the drain time it had started with."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
import uvicorn

from gateway.gateway_server import LAST_FRAMES_SECONDS, Stopping
from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import CONFIG, Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(("drain", "seconds"), [("100s", 100), ("never", 86400)])
async def test_the_drain_time_in_force_when_it_stops_is_the_servers_too(
    tmp_path: Path, drain: str, seconds: int
) -> None:
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url, CONFIG + "drain_seconds: 1s\n") as gateway:
        server = uvicorn.Server(uvicorn.Config(lambda: None, timeout_graceful_shutdown=4))
        stopping = Stopping(gateway.runtime, server, notice_seconds=0.01)
        gateway.write(CONFIG + f"drain_seconds: {drain}\n")
        assert (await gateway.admin("POST", "/admin/reload")).json()["needs_restart"] == []
        stopping.begin(signal.SIGTERM)
        await until("it takes no new connections", lambda: server.should_exit)
        assert server.config.timeout_graceful_shutdown == seconds + LAST_FRAMES_SECONDS
        await asyncio.sleep(0)
        await stopping.aclose()
