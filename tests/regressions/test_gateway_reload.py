"""Requests and settings across a reload of the configuration."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from gateway.gateway_server import LAST_FRAMES_SECONDS, Shutdown
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import CONFIG, Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(("drain", "seconds"), [("100s", 100), ("never", 86400)])
async def test_reloaded_drain_time_applies_to_the_server(tmp_path: Path, drain: str, seconds: int) -> None:
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url, CONFIG + "drain_seconds: 1s\n") as gateway:
        server = uvicorn.Server(uvicorn.Config(lambda: None, timeout_graceful_shutdown=4))
        stopping = Shutdown(gateway.runtime, server, notice_seconds=0.01)
        gateway.write(CONFIG + f"drain_seconds: {drain}\n")
        assert (await gateway.admin("POST", "/admin/reload")).json()["needs_restart"] == []
        stopping.begin(signal.SIGTERM)
        await until("the server stops accepting", lambda: server.should_exit)
        assert server.config.timeout_graceful_shutdown == seconds + LAST_FRAMES_SECONDS
        await asyncio.sleep(0)
        await stopping.aclose()


async def test_sigint_stops_accepting_without_a_notice_to_balancers(tmp_path: Path) -> None:
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url, CONFIG) as gateway:
        server = uvicorn.Server(uvicorn.Config(lambda: None))
        stopping = Shutdown(gateway.runtime, server, notice_seconds=60)
        stopping.begin(signal.SIGINT)
        await until("the server stops accepting", lambda: server.should_exit, seconds=2)
        await stopping.aclose()


BEFORE = """
routes:
  demo: {chain: [local/demo]}
admission: {max_in_flight: 1}
"""
AFTER = BEFORE.replace("demo:", "other:")


async def test_queued_request_keeps_its_route_when_a_reload_removes_it(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url, BEFORE) as gateway:
        fake.answers["demo"] = Answer(hold=gate)
        first = asyncio.create_task(gateway.chat())
        await until("the first is admitted", lambda: fake.seen)
        second = asyncio.create_task(gateway.chat())
        depth = "gateway_queue_depth 1.0"
        await until("the second waits", lambda: depth in gateway.runtime.telemetry.render().decode())
        gateway.write(AFTER)
        assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
        gate.set()
        assert [(await one).status_code for one in (first, second)] == [200, 200]
        assert (await gateway.chat()).status_code == 404


class _Slow(dict[str, str]):
    """An environment whose reading blocks until another request was answered."""

    def __init__(self, environ: dict[str, str]) -> None:
        super().__init__(environ)
        self.begun, self.answered = threading.Event(), threading.Event()

    def get(self, name: str, default: Any = None) -> Any:
        self.begun.set()
        assert self.answered.wait(20), "no request was answered while the configuration was read"
        return super().get(name, default)


async def test_requests_are_answered_while_a_reload_reads_the_configuration(tmp_path: Path) -> None:
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url) as gateway:
        gateway.environ = slow = _Slow(gateway.environ)
        gateway.write(CONFIG + "drain_seconds: 7s\n")
        reload = asyncio.create_task(gateway.admin("POST", "/admin/reload"))
        await asyncio.to_thread(slow.begun.wait, 20)
        assert (await gateway.client.get("/livez")).status_code == 200
        slow.answered.set()
        assert (await reload).json()["changed"] == ["drain_seconds: 30.0 -> 7.0"]
