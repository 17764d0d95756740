"""The authority under pressure: others take a device, models make room before anything fails, and it all comes back."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference.app import Service
from inference.authority.handlers.watching.governor import limits
from inference.authority.lifecycle.departures import Reason
from inference.authority.pressure.levels import Level
from inference.authority.pressure.relief import Rung
from inference.devices.device import Reading
from inference.errors import MemoryLimitExceededError
from inference.protocol import DeviceState, ModelState
from tests.rigs.asgi import ask
from tests.rigs.authority_rig import MIB, FakeAccelerator, FakeEstimator, SharedDevice, Start, services

GPU = "gpu-0"
NEVER = {"PRESSURE_CHECK_INTERVAL_SECONDS": "3600"}
"""Only the checks that a test asks for."""


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def begin(
    start: Start, models: dict[str, dict[str, Any]], sizes: dict[str, int], *, foreign_mib: int = 0, **environ: str
) -> tuple[Service, SharedDevice]:
    estimator = FakeEstimator()
    estimator.sizes = sizes
    gpu = SharedDevice(foreign_mib)
    service = await start(models, accelerator=gpu, estimator=estimator, **(NEVER | environ))
    gpu.service = service
    return service, gpu


async def load(service: Service, *names: str) -> None:
    for name in names:
        await service.authority.load(service.authority.resolve(name))


def state(service: Service, name: str) -> ModelState:
    return service.authority.resolve(name).state


def level(service: Service) -> Level:
    return service.authority.levels()[GPU][1]


async def get(service: Service, path: str, query: str = "") -> tuple[int, str]:
    """Status and body of a GET, asked of the application itself."""
    said: list[Any] = []
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": [(b"authorization", b"Bearer token")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        said.append(message)

    await service.app(scope, receive, send)
    return said[0]["status"], b"".join(message.get("body", b"") for message in said[1:]).decode()


async def test_others_who_take_memory_make_idle_models_leave_before_anything_fails(start: Start) -> None:
    """Nobody asked for anything: the tick saw it, and the record says why."""
    service, gpu = await begin(start, {"old": {}, "new": {}}, {"old": 300, "new": 300})
    await load(service, "old")
    await service.clock.advance(200)
    await load(service, "new")
    gpu.foreign_mib = 100
    await service.authority.reached(lambda: bool(service.authority.state.evictions))
    assert state(service, "new") is ModelState.READY
    record = service.authority.state.evictions[-1]
    assert (record.model_name, record.reason) == ("old", Reason.PRESSURE)
    assert (
        "gpu-0 is at moderate: 700.0 MiB of 1000.0 MiB are in use, 100.0 MiB of it by others" in record.explanation[0]
    )
    await load(service, "old")


async def test_at_critical_every_idle_model_leaves_and_a_busy_one_goes_on(start: Start) -> None:
    service, gpu = await begin(start, {"a": {}, "b": {}, "p": {"pinned": True}}, {"a": 200, "b": 200, "p": 200})
    await load(service, "a", "b", "p")
    with service.authority.ask(service.authority.resolve("b")) as ticket:
        assert await ticket.wait(10) is not None
        gpu.foreign_mib = 350
        await service.authority.reached(lambda: state(service, "a") is ModelState.COLD)
        assert (state(service, "b"), state(service, "p")) == (ModelState.BUSY, ModelState.READY)
    gpu.foreign_mib = 0


async def test_a_model_that_fills_its_budget_is_left_alone(start: Start) -> None:
    service, gpu = await begin(start, {"a": {}}, {"a": 880}, foreign_mib=20, GPU_MEMORY_MAX_PERCENT="0.95")
    await load(service, "a")
    await service.clock.advance(290)
    for foreign in (20, 25, 15, 30):
        gpu.foreign_mib = foreign
        service.authority.check(regular=True)
    assert (level(service), state(service, "a")) == (Level.HIGH, ModelState.READY)
    gpu.foreign_mib = 60
    await service.authority.reached(lambda: state(service, "a") is ModelState.COLD)


async def test_without_the_governor_nothing_leaves_and_admission_is_as_strict(start: Start) -> None:
    service, gpu = await begin(start, {"a": {}, "b": {}}, {"a": 300, "b": 500}, ENABLE_MEMORY_GOVERNOR="false")
    await load(service, "a")
    await service.clock.advance(290)
    gpu.foreign_mib = 690
    for _ in range(8):
        service.authority.check(regular=True)
    assert (level(service), state(service, "a")) == (Level.EMERGENCY, ModelState.READY)
    with pytest.raises(MemoryLimitExceededError):
        await load(service, "b")


@pytest.mark.parametrize(("eager", "left"), [("false", False), ("true", True)])
async def test_below_critical_idle_models_leave_unasked_only_if_eager(start: Start, eager: str, left: bool) -> None:
    service, _ = await begin(start, {"a": {}}, {"a": 700}, PRESSURE_EAGER=eager)
    await load(service, "a")
    await service.clock.advance(200)
    service.authority.check(regular=True)
    assert (state(service, "a") is not ModelState.READY) == left


@pytest.mark.parametrize(("seconds", "left"), [("120", False), ("50", True)])
async def test_the_idle_threshold_is_a_setting(start: Start, seconds: str, left: bool) -> None:
    service, _ = await begin(
        start, {"a": {}}, {"a": 700}, PRESSURE_EAGER="true", EVICTION_IDLE_THRESHOLD_SECONDS=seconds
    )
    await load(service, "a")
    await service.clock.advance(100)
    service.authority.check(regular=True)
    assert (state(service, "a") is not ModelState.READY) == left


async def test_the_ladder_slows_workers_down_and_refuses_loads_and_lets_go_again(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    service, gpu = await begin(start, {"busy": {"parallel": 16}, "b": {}}, {"busy": 300, "b": 80})
    authority = service.authority
    await load(service, "busy")
    caplog.set_level(logging.INFO)
    with authority.ask(authority.resolve("busy")) as ticket:
        assert await ticket.wait(10) is not None
        gpu.foreign_mib = 690
        for _ in range(6):
            authority.check(regular=True)
        assert authority.rungs() == {GPU: Rung.NO_LOADS, "cpu": Rung.NONE}
        gpu.foreign_mib = 510  # there is room again, and the ladder has not been left yet
        authority.check(regular=True)
        with pytest.raises(MemoryLimitExceededError) as caught:
            await load(service, "b")
        assert "too full (high) for any load until its use is below HIGH" in caught.value.message
        assert "810.0 MiB of 1000.0 MiB are in use, 510.0 MiB of it by others" in caught.value.message
        assert authority.status(authority.resolve("b")).fits is False
        refusal, _ = await authority.dry_run(authority.resolve("b"), {"context_length": 512})
        assert "too full" in getattr(refusal, "reason", "")
        gpu.foreign_mib = 100
        for _ in range(5):
            authority.check(regular=True)
        assert authority.rungs()[GPU] is Rung.NONE
        await load(service, "b")
    said = [record.getMessage() for record in caplog.records if record.name == "inference.authority"]
    halved = [line.split(":")[0] for line in said if "admits at" in line]
    assert halved == [f"busy admits at most {count} at once" for count in (8, 4, 2, 1, 2, 4, 8, 16)]
    assert sum("drops the prefixes" in line for line in said) == 4
    (worst,) = [line for line in said if line.startswith("gpu-0 is at emergency (low before)")]
    assert "990.0 MiB of 1000.0 MiB are in use, 690.0 MiB of it by others" in worst


async def test_before_all_loads_those_with_vision_or_adapters_are_refused(start: Start, tmp_path: Path) -> None:
    file = str(tmp_path / "x.gguf")
    extras: dict[str, dict[str, Any]] = {"sees": {"mmproj": file}, "adapted": {"lora": [file]}}
    service, gpu = await begin(
        start, {"busy": {}, "plain": {}, **extras}, {"busy": 300} | dict.fromkeys(["plain", *extras], 40)
    )
    authority = service.authority
    await load(service, "busy")
    with service.authority.ask(service.authority.resolve("busy")) as ticket:
        assert await ticket.wait(10) is not None
        gpu.foreign_mib = 690
        for _ in range(4):
            authority.check(regular=True)
        assert authority.rungs()[GPU] is Rung.NO_EXTRAS
        gpu.foreign_mib = 510
        authority.check(regular=True)
        for name in extras:
            with pytest.raises(MemoryLimitExceededError) as caught:
                await load(service, name)
            assert "gpu-0 is too full (high) to load a model with vision or LoRA" in caught.value.message
        await load(service, "plain")
        gpu.foreign_mib = 100
        for _ in range(2):
            authority.check(regular=True)
        await load(service, "sees")


async def test_a_worker_that_starts_late_is_slowed_down_too(start: Start) -> None:
    service, gpu = await begin(start, {"a": {"parallel": 8}}, {"a": 300})
    authority = service.authority
    gpu.foreign_mib = 990
    for _ in range(3):
        authority.check(regular=True)
    gpu.foreign_mib = 550
    service.authority.observe()
    await load(service, "a")
    authority.check(regular=True)
    assert limits(authority.state) == {"a": 4}, "and a rung was left, because what is in use now was admitted"


async def test_a_service_that_starts_on_a_full_device_starts_says_so_and_refuses_with_numbers(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    service, gpu = await begin(start, {"a": {}}, {"a": 300}, foreign_mib=930)
    assert service.authority.state.started
    assert (
        "gpu-0 is at critical (low before): 930.0 MiB of 1000.0 MiB are in use, 930.0 MiB of it by others"
        in caplog.text
    )
    with pytest.raises(MemoryLimitExceededError) as caught:
        await load(service, "a")
    (shortage,) = caught.value.shortages
    assert (shortage.device, shortage.need_bytes, shortage.free_bytes) == (GPU, 300 * MIB, 0)
    gpu.foreign_mib = 100
    await load(service, "a")


async def test_what_is_lost_is_under_no_pressure(start: Start) -> None:
    """Its last figures may say anything; that it is lost is told elsewhere."""
    service, gpu = await begin(start, {"a": {}}, {"a": 300}, foreign_mib=990)
    assert service.authority.alerts()
    seen = gpu.readings()
    gpu.readings = lambda: (replace(seen[0], state=DeviceState.LOST),)  # type: ignore[method-assign]
    service.authority.check(regular=True)
    assert set(service.authority.rungs()) == {"cpu"}
    assert GPU not in [alert.subject for alert in service.authority.alerts() if alert.kind == "pressure"]
    assert GPU in service.authority.levels()


async def test_readings_that_fail_end_no_check(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    service, gpu = await begin(start, {"a": {}}, {"a": 300}, PRESSURE_CHECK_INTERVAL_SECONDS="0.1")
    gpu.failure = OSError("gone")
    before = len(service.authority.state.pressure.history)
    await service.authority.reached(lambda: len(service.authority.state.pressure.history) > before + 1)
    assert "could not be read for a check" in caplog.text


async def test_a_limit_of_our_own_share_leaves_the_rest_of_the_device_to_others(start: Start) -> None:
    """INFERENCE_GPU_MEMORY_LIMIT_MB bounds what is ours, however much others use beside it."""
    service, _ = await begin(
        start, {"a": {}, "b": {}}, {"a": 300, "b": 420}, foreign_mib=500, GPU_MEMORY_LIMIT_MB="310"
    )
    await load(service, "a")
    with pytest.raises(MemoryLimitExceededError, match="bound by the share of the device that may be used"):
        await load(service, "b")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("MODERATE", Level.MODERATE), ("HIGH", Level.HIGH), ("CRITICAL", Level.CRITICAL), ("EMERGENCY", Level.EMERGENCY)],
)
async def test_the_bounds_are_settings(start: Start, setting: str, expected: Level) -> None:
    """All from one of them on begin at 50 %, the others stay where they are by default."""
    names = ["MODERATE", "HIGH", "CRITICAL", "EMERGENCY"]
    bounds = {f"PRESSURE_{name}": "0.5" for name in names[: names.index(setting) + 1]}
    service, _ = await begin(start, {}, {}, foreign_mib=520, **bounds)
    assert level(service) is expected


async def test_memory_that_is_shared_has_one_level_and_one_ladder(start: Start) -> None:
    """An accelerator without memory of its own is as full as the host, and refuses what the host refuses."""
    host = SharedDevice(id="cpu", kind="cpu")

    class Unified(FakeAccelerator):
        def readings(self) -> tuple[Reading, ...]:
            return (Reading(GPU, "mtl", "fake", 1000 * MIB, 1000 * MIB, 0, unified=True),)

    service = await start(
        {"a": {"warm": False}, "b": {}}, probes=[Unified(), host], accelerator=Unified(), CPU_MEMORY_MAX_PERCENT="0.9",
        **NEVER,
    )  # fmt: skip
    authority = service.authority
    host.service = service
    authority.check(regular=False)
    await load(service, "a")
    await service.clock.advance(200)
    host.foreign_mib = 600
    authority.check(regular=False)
    assert {name: str(found) for name, (_, found) in authority.levels().items()} == {
        GPU: "moderate",
        "cpu": "moderate",
    }
    await authority.reached(lambda: bool(authority.state.evictions))
    host.foreign_mib = 990
    for _ in range(5):
        authority.check(regular=True)
    assert authority.rungs() == {"cpu": Rung.NO_LOADS}
    host.foreign_mib = 830
    with pytest.raises(MemoryLimitExceededError, match="cpu is too full"):
        await load(service, "b")
    assert authority.alerts()


async def test_a_sample_says_which_share_of_all_sequences_is_in_use(start: Start) -> None:
    service = await start({"a": {"parallel": 4}}, {"a": {"answer_seconds": 20}}, PRESSURE_CHECK_INTERVAL_SECONDS="0.1")
    asking = asyncio.create_task(ask(service.app, "POST", "/v1/completions", {"model": "a", "prompt": "x"}))
    await service.authority.reached(lambda: service.authority.state.pressure.history[-1].pool_utilization > 0)
    sample = service.authority.state.pressure.history[-1]
    assert (sample.active_requests, sample.pool_utilization, sample.models_loaded) == (1, 0.25, 1)
    asking.cancel()
    await asyncio.wait({asking})


async def test_health_stats_history_and_metrics_tell_the_same_level(start: Start) -> None:
    service, gpu = await begin(start, {"a": {"parallel": 4}}, {"a": 300})
    await load(service, "a")
    gpu.foreign_mib = 650
    service.authority.check(regular=True)
    for path in ("/health", "/memory/health"):
        status, body = await get(service, path)
        assert (status, json.loads(body)["devices"][GPU]["pressure"]) == (503, "critical")
    _, body = await get(service, "/memory/stats")
    device = json.loads(body)["per_device"][GPU]
    assert (device["pressure_level"], device["used_percent"]) == ("critical", 95)
    _, body = await get(service, "/metrics")
    assert 'inference_pressure_level{device="gpu-0"} 3.0' in body
    _, body = await get(service, "/memory/history", "minutes=5")
    (sample,) = json.loads(body)["samples"]
    assert sample["devices"][GPU]["pressure_level"] == "low"
    assert {"timestamp", "active_requests", "pool_utilization", "models_loaded", "models_warm"} < set(sample)
    for wrong in ("0", "-1", "x"):
        status, body = await get(service, "/memory/history", f"minutes={wrong}")
        assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_request")
