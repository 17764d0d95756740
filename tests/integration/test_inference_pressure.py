"""Levels of pressure: of unified memory, in samples, and equal in all answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from inference.app import Service
from inference.authority.pressure.relief import Restriction
from inference.devices.device import Reading
from inference.errors import MemoryLimitExceededError
from tests.rigs.asgi import ask
from tests.rigs.authority_rig import MIB, FakeAccelerator, FakeEstimator, SharedDevice, Start

GPU = "gpu-0"
SELDOM = {"PRESSURE_CHECK_INTERVAL_SECONDS": "5"}
"""A regular check only when a test lets the clock run."""


async def begin(
    start: Start, models: dict[str, dict[str, Any]], sizes: dict[str, int], *, foreign_mib: int = 0, **environ: str
) -> tuple[Service, SharedDevice]:
    estimator = FakeEstimator()
    estimator.sizes = sizes
    gpu = SharedDevice(foreign_mib)
    service = await start(models, accelerator=gpu, estimator=estimator, **(SELDOM | environ))
    gpu.service = service
    return service, gpu


async def load(service: Service, *names: str) -> None:
    for name in names:
        await service.authority.load(service.authority.resolve(name))


async def get(service: Service, path: str, query: str = "") -> tuple[int, str]:
    """Status and body of a GET request to the application."""
    sent: list[Any] = []
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": [(b"authorization", b"Bearer token")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await service.app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode()


async def test_unified_memory_has_one_level_and_one_restriction(start: Start) -> None:
    """An accelerator without memory of its own is as full as the host, and refuses what the host refuses."""
    host = SharedDevice(id="cpu", kind="cpu")

    class Unified(FakeAccelerator):
        def readings(self) -> tuple[Reading, ...]:
            return (Reading(GPU, "mtl", "fake", 1000 * MIB, 1000 * MIB, 0, unified=True),)

    service = await start(
        {"a": {"warm": False}, "b": {}}, probes=[Unified(), host], accelerator=Unified(), CPU_MEMORY_MAX_PERCENT="0.9",
        **SELDOM,
    )  # fmt: skip
    authority = service.authority
    host.service = service
    await load(service, "a")
    await service.clock.advance(200)
    host.foreign_mib = 600
    await service.clock.advance(0.5)
    assert {name: str(found) for name, (_, found) in authority.levels().items()} == {
        GPU: "moderate",
        "cpu": "moderate",
    }
    await authority.reached(lambda: bool(authority.state.evictions))
    host.foreign_mib = 990
    for _ in range(5):
        await service.check_pressure()
    assert authority.restrictions() == {"cpu": Restriction.NO_LOADS}
    host.foreign_mib = 830
    with pytest.raises(MemoryLimitExceededError, match="cpu is too full"):
        await load(service, "b")
    assert authority.alerts()


async def test_sample_has_the_share_of_sequences_in_use(start: Start) -> None:
    service = await start({"a": {"parallel": 4}}, {"a": {"answer_seconds": 20}}, PRESSURE_CHECK_INTERVAL_SECONDS="0.1")
    asking = asyncio.create_task(ask(service.app, "POST", "/v1/completions", {"model": "a", "prompt": "x"}))
    await service.authority.reached(lambda: service.authority.state.pressure.history[-1].pool_utilization > 0)
    sample = service.authority.state.pressure.history[-1]
    assert (sample.active_requests, sample.pool_utilization, sample.models_loaded) == (1, 0.25, 1)
    asking.cancel()
    await asyncio.wait({asking})


async def test_health_stats_history_and_metrics_have_the_same_level(start: Start) -> None:
    service, gpu = await begin(start, {"a": {"parallel": 4, "pinned": True}}, {"a": 300})
    await load(service, "a")
    gpu.foreign_mib = 650
    await service.check_pressure()
    for path in ("/health", "/memory/health"):
        status, body = await get(service, path)
        assert (status, json.loads(body)["devices"][GPU]["pressure"]) == (503, "critical")
    _, body = await get(service, "/memory/stats")
    device = json.loads(body)["per_device"][GPU]
    assert (device["pressure_level"], device["used_percent"]) == ("critical", 95)
    _, body = await get(service, "/metrics")
    assert 'inference_pressure_level{device="gpu-0"} 3.0' in body
    _, body = await get(service, "/memory/history", "minutes=5")
    first, last = json.loads(body)["samples"]
    assert [sample["devices"][GPU]["pressure_level"] for sample in (first, last)] == ["low", "critical"]
    assert {"timestamp", "active_requests", "pool_utilization", "models_loaded", "models_warm"} < set(last)
    for wrong in ("0", "-1", "x"):
        status, body = await get(service, "/memory/history", f"minutes={wrong}")
        assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_request")
