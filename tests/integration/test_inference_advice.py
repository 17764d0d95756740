"""Every recommendation, applied as it is written: the alert goes, and what it was about works."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headgate.shared.state_directory import StateDir
from inference import settings
from inference.app import Service
from inference.authority.pressure.advice import SWAPS, TURNED_AWAY, Kind
from inference.authority.state import Timing
from inference.devices.device import CPU
from inference.errors import MemoryLimitExceededError, QueueFull
from inference.estimate.estimator import Estimator
from inference.protocol import ModelState, Priority
from tests.rigs import tiny_gguf
from tests.rigs.authority_rig import MIB, FakeAccelerator, FakeEstimator, SharedDevice, Start, rewrite, services

LARGE = {"path": str(tiny_gguf.generative()), "context_length": 65536, "parallel": 8}
"""A cache of 128 MiB."""

QUICK = {"timing": Timing(watch_seconds=0.1)}


class Site:
    """A service whose operator can do as he is told."""

    def __init__(self, root: Path, start: Start, models: dict[str, dict[str, Any]], **environ: str) -> None:
        self.root, self._start, self.models = root, start, models
        self.environ = {"PRESSURE_CHECK_INTERVAL_SECONDS": "3600", **environ}

    async def begin(self, behavior: dict[str, Any] | None = None, **parts: Any) -> Service:
        self.forced = {} if "accelerator" in parts else {"INFERENCE_FORCE_CPU_MODE": "true"}
        self.service: Service = await self._start(self.models, behavior, **parts, **self.environ)
        return self.service

    def alerts(self) -> dict[Kind, dict[str, str]]:
        """What is recommended, by the kind of alert."""
        found = self.service.authority.alerts()
        return {alert.kind: {change.setting: change.value for change in alert.changes} for alert in found}

    def apply(self, recommended: dict[str, str]) -> None:
        """Writes every setting where it belongs, and reloads."""
        assert recommended
        for name, value in recommended.items():
            if name.startswith("INFERENCE_"):
                self.environ[name.removeprefix("INFERENCE_")] = value
            else:
                _, model, setting = name.split(".")
                self.models[model][setting] = value
        rewrite(self.root, self.models)
        said = self.forced | {f"INFERENCE_{key}": value for key, value in self.environ.items()}
        self.service.authority.reload(settings.load(self.root, said, {}))

    async def load(self, *names: str) -> None:
        for name in names:
            await self.service.authority.load(self.service.authority.resolve(name))

    def state(self, name: str) -> ModelState:
        return self.service.authority.resolve(name).state


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


def real_estimator(root: Path) -> Estimator:
    state = StateDir.from_env({"HEADGATE_STATE_DIR": str(root / "estimates")})
    return Estimator(state, seconds=60)


async def test_a_share_of_a_gpu_that_others_fill(tmp_path: Path, start: Start) -> None:
    site = Site(tmp_path, start, {"a": {}})
    estimator = FakeEstimator()
    estimator.sizes = {"a": 400}
    gpu = SharedDevice()
    service = await site.begin(accelerator=gpu, estimator=estimator)
    gpu.service = service
    with service.authority.ask(service.authority.resolve("a")) as ticket:
        assert await ticket.wait(10) is not None
        gpu.foreign_mib = 550
        service.authority.check(regular=True)
        expected = {Kind.PRESSURE: {}, Kind.FOREIGN_USE: {"INFERENCE_GPU_MEMORY_LIMIT_MB": "330"}}
        assert site.alerts() == expected
        site.apply(expected[Kind.FOREIGN_USE])
        assert site.alerts() == {Kind.PRESSURE: {}}, "who works is not interrupted"
    service.authority.check(regular=True)
    await service.authority.reached(lambda: site.alerts() == {})
    with pytest.raises(MemoryLimitExceededError):
        await site.load("a")


async def test_where_others_alone_fill_a_device_nothing_is_recommended(tmp_path: Path, start: Start) -> None:
    site = Site(tmp_path, start, {"a": {}})
    gpu = SharedDevice(930)
    service = await site.begin(accelerator=gpu)
    assert site.alerts() == {Kind.PRESSURE: {}, Kind.FOREIGN_USE: {}}
    gpu.foreign_mib = 100
    service.authority.check(regular=True)
    assert site.alerts() == {Kind.FOREIGN_USE: {}}, "it was so lately"


async def test_a_share_of_host_memory_that_others_fill(tmp_path: Path, start: Start) -> None:
    site = Site(tmp_path, start, {"a": {"pinned": True}}, CPU_MEMORY_MAX_PERCENT="0.90")
    host = SharedDevice(id=CPU, kind="cpu")
    service = await site.begin(probes=[host])
    host.service = service
    await site.load("a")
    host.foreign_mib = 820
    service.authority.check(regular=True)
    host.foreign_mib = 500
    service.authority.check(regular=True)
    assert site.alerts() == {Kind.FOREIGN_USE: {"INFERENCE_CPU_MEMORY_MAX_PERCENT": "0.06"}}
    site.apply(site.alerts()[Kind.FOREIGN_USE])
    assert site.alerts() == {}


async def test_models_that_swap_are_made_to_fit_together(tmp_path: Path, start: Start) -> None:
    site = Site(tmp_path, start, {"a": {**LARGE}, "b": {**LARGE}}, MEMORY_LIMIT_GB="0.42")
    await site.begin(estimator=real_estimator(tmp_path))
    for _ in range(SWAPS // 2):
        await site.load("a", "b")
    await site.load("a")
    (alert,) = site.alerts().items()
    assert alert[0] is Kind.THRASH
    assert {name.rpartition(".")[2] for name in alert[1]} <= {"parallel", "context_length", "kv_type"}
    site.apply(alert[1])
    await site.load("a", "b")
    assert site.alerts() == {}
    assert (site.state("a"), site.state("b")) == (ModelState.READY, ModelState.READY)


async def test_models_that_swap_and_cannot_be_made_to_fit_stay_longer(tmp_path: Path, start: Start) -> None:
    site = Site(tmp_path, start, {"a": {}, "b": {}}, MEMORY_LIMIT_GB="0.15")
    await site.begin()
    for _ in range(SWAPS // 2):
        await site.load("a", "b")
    await site.load("a")
    recommended = site.alerts()[Kind.THRASH]
    assert set(recommended) == {"models.a.min_residency", "models.b.min_residency"}
    site.apply(recommended)
    assert site.alerts() == {}


async def test_a_model_that_was_refused_is_made_to_fit(tmp_path: Path, start: Start) -> None:
    site = Site(tmp_path, start, {"a": {**LARGE}}, MEMORY_LIMIT_GB="0.15")
    await site.begin(estimator=real_estimator(tmp_path))
    with pytest.raises(MemoryLimitExceededError):
        await site.load("a")
    recommended = site.alerts()[Kind.REFUSED]
    assert set(recommended) == {"models.a.parallel"}
    site.apply(recommended)
    await site.load("a")
    assert site.alerts() == {}


@pytest.mark.parametrize(
    ("environ", "setting"),
    [
        ({"MEMORY_LIMIT_GB": "0.05"}, "INFERENCE_MEMORY_LIMIT_GB"),
        ({"GPU_MEMORY_LIMIT_MB": "60"}, "INFERENCE_GPU_MEMORY_LIMIT_MB"),
        ({"GPU_MEMORY_MAX_PERCENT": "0.05"}, "INFERENCE_GPU_MEMORY_MAX_PERCENT"),
    ],
)
async def test_a_limit_that_keeps_a_model_out_is_raised_as_far_as_it_needs(
    tmp_path: Path, start: Start, environ: dict[str, str], setting: str
) -> None:
    site = Site(tmp_path, start, {"a": {}}, **environ)
    await site.begin(accelerator=FakeAccelerator())
    with pytest.raises(MemoryLimitExceededError):
        await site.load("a")
    assert set(site.alerts()[Kind.REFUSED]) == {setting}
    site.apply(site.alerts()[Kind.REFUSED])
    await site.load("a")
    assert site.alerts() == {}


async def test_a_share_of_host_memory_that_keeps_a_model_out_is_raised(tmp_path: Path, start: Start) -> None:
    site = Site(tmp_path, start, {"a": {}}, CPU_MEMORY_MAX_PERCENT="0.05")
    await site.begin(probes=[SharedDevice(100, id=CPU, kind="cpu")])
    with pytest.raises(MemoryLimitExceededError):
        await site.load("a")
    assert site.alerts() == {Kind.REFUSED: {"INFERENCE_CPU_MEMORY_MAX_PERCENT": "0.1"}}
    site.apply(site.alerts()[Kind.REFUSED])
    await site.load("a")
    assert site.alerts() == {}


async def test_a_device_that_is_too_small_is_no_matter_of_settings(tmp_path: Path, start: Start) -> None:
    site = Site(tmp_path, start, {"a": {}})
    estimator = FakeEstimator()
    estimator.sizes = {"a": 2000}
    await site.begin(accelerator=FakeAccelerator(), estimator=estimator)
    with pytest.raises(MemoryLimitExceededError):
        await site.load("a")
    assert site.alerts() == {Kind.REFUSED: {}}


async def test_an_overhead_that_a_worker_outgrew(tmp_path: Path, start: Start) -> None:
    site = Site(tmp_path, start, {"a": {**LARGE}})
    service = await site.begin({"a": {"grow": 600 * MIB}}, estimator=real_estimator(tmp_path), parts=QUICK)
    await site.load("a")
    await service.authority.reached(lambda: Kind.OUTGROWN in site.alerts())
    (setting,) = recommended = site.alerts()[Kind.OUTGROWN]
    assert setting == "models.a.memory_overhead"
    site.apply(recommended)
    assert site.alerts() == {}
    await service.authority.reached(lambda: site.state("a") is ModelState.COLD)
    await site.load("a")
    await asyncio.sleep(0.3)  # it is looked at meanwhile
    assert site.alerts() == {}, "and it does not outgrow this"
    running = service.authority.resolve("a").running
    assert running is not None
    assert running.placement.need[CPU] > 600 * MIB
    assert running.grown_bytes == 0


@pytest.mark.parametrize("priority", Priority)
async def test_a_queue_that_is_full_again_and_again(tmp_path: Path, start: Start, priority: Priority) -> None:
    setting = f"QUEUE_{priority.upper()}"
    site = Site(tmp_path, start, {"a": {}}, **{setting: "0"})
    service = await site.begin()
    model = service.authority.resolve("a")
    for _ in range(TURNED_AWAY):
        assert site.alerts() == {}
        with pytest.raises(QueueFull):
            service.authority.ask(model, priority=priority)
    assert site.alerts() == {Kind.QUEUE_FULL: {f"INFERENCE_{setting}": str(TURNED_AWAY)}}
    site.apply(site.alerts()[Kind.QUEUE_FULL])
    assert site.alerts() == {}
    tickets = [service.authority.ask(model, priority=priority) for _ in range(TURNED_AWAY)]
    for ticket in tickets:
        ticket.close()


async def test_alerts_are_logged_once_and_when_they_are_over(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "inference.authority")
    site = Site(tmp_path, start, {"a": {}}, QUEUE_NORMAL="0")
    service = await site.begin()
    for _ in range(TURNED_AWAY):
        with pytest.raises(QueueFull):
            service.authority.ask(service.authority.resolve("a"))
    for _ in range(2):
        service.authority.check(regular=True)
    site.apply({"INFERENCE_QUEUE_NORMAL": "5"})
    service.authority.check(regular=True)
    begun, over = (record.getMessage() for record in caplog.records if "alert" in record.getMessage())
    assert begun.startswith("alert queue_full: 5 requests of normal priority found 0 waiting already in 300 s")
    assert begun.endswith("; recommended: INFERENCE_QUEUE_NORMAL=5")
    assert over == "alert queue_full is over: normal"


async def test_without_alerts_nothing_is_said(tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    site = Site(tmp_path, start, {"a": {}}, ENABLE_MEMORY_ALERTS="false")
    gpu = SharedDevice(930)
    service = await site.begin(accelerator=gpu)
    service.authority.check(regular=True)
    assert site.alerts() == {}
    assert "alert" not in caplog.text
