"""Every INFERENCE_* setting has an effect: one test each.

A setting without a test fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headgate.shared.errors import ConfigError
from headgate.shared.state_directory import StateDir
from inference import settings
from inference.app import Service
from inference.authority.placement.plan import EvictionState
from inference.devices.device import CPU
from inference.devices.host import CpuProbe
from inference.devices.inventory import Inventory
from inference.environment_settings import PREFIX, environment_names
from inference.errors import DeadlineExceeded, MemoryLimitExceededError, QueueFull
from inference.estimate.estimator import Estimator
from inference.protocol import ModelState, Priority
from tests.rigs import authority_rig, tiny_gguf
from tests.rigs.asgi import ask
from tests.rigs.authority_rig import MIB, CacheEstimator, FakeAccelerator, FakeEstimator, SharedDevice, Start, services
from tests.rigs.cuda_stub import CudaStub
from tests.rigs.live_authority import LiveModel as Model
from tests.rigs.processes import Service as Process
from tests.rigs.processes import free_port, http_status, private_env

LONG_STEP = 60.5
"""Seconds of a step of one token: allowed by default, 60 + 1, and not with one less of either."""


class OtherAddress(Process):
    """A service that listens on another loopback address."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.2:{self.port}"


@dataclass
class Bench:
    """The tools of a test: services, a directory, and changes of the rig."""

    directory: Path
    patch: pytest.MonkeyPatch
    stack: contextlib.AsyncExitStack
    started: int = 0

    async def start(self, models: dict[str, dict[str, Any]], *more: Any, **environ: Any) -> Service:
        """A service in a directory of its own; all are closed at the end."""
        self.started += 1
        directory = self.directory / str(self.started)
        directory.mkdir()
        make: Start = await self.stack.enter_async_context(services(directory, self.patch))
        service: Service = await make(models, *more, **environ)
        return service

    async def loaded(self, models: dict[str, dict[str, Any]] | None = None, **environ: Any) -> tuple[Service, Model]:
        """A service with the loaded model `a`."""
        service = await self.start(models or {"a": {}}, **environ)
        model = service.authority.resolve("a")
        await service.authority.load(model, 10)
        return service, model

    async def grant(self, **environ: str) -> dict[str, Any]:
        """The grant of the worker of a model without its own settings."""
        path = self.directory / "grant.json"
        await self.loaded(behavior={"a": {"grant_file": str(path)}}, accelerator=FakeAccelerator(), **environ)
        return dict(json.loads(path.read_text()))

    async def fits(self, size_mb: int, *, on: FakeAccelerator | None, **environ: str) -> bool:
        """Whether a model of that size is loaded on the accelerator, or on the CPU without one."""
        estimator = FakeEstimator()
        estimator.sizes["a"] = size_mb
        service = await self.start({"a": {}}, accelerator=on, estimator=estimator, **environ)
        try:
            await service.authority.load(service.authority.resolve("a"), 10)
        except MemoryLimitExceededError:
            return False
        return True

    async def queue_takes(self, priority: Priority, **environ: str) -> bool:
        """Whether one request may wait for a model whose measurement never ends."""
        estimator = FakeEstimator()
        estimator.gate = asyncio.Event()
        service = await self.start({"a": {}}, estimator=estimator, **environ)
        try:
            service.authority.ask(service.authority.resolve("a"), priority=priority).close()
        except QueueFull as error:
            assert f"INFERENCE_QUEUE_{priority.upper()}" in error.message
            return False
        finally:
            estimator.gate.set()
        return True

    async def failure(self, behavior: dict[str, Any], **environ: str) -> str:
        """The error of a model whose worker has this behavior."""
        service = await self.start({"a": {}}, {"a": behavior}, **environ)
        model = service.authority.resolve("a")
        ticket = service.authority.ask(model)
        await service.authority.reached(lambda: model.failure is not None, seconds=15)
        ticket.close()
        return str(model.failure)

    def configured(self, text: str = "models: {}", **environ: str) -> settings.InferenceConfig:
        """A configuration in its own directory."""
        (self.directory / "models.yaml").write_text(text)
        return settings.load(self.directory, {PREFIX + name: value for name, value in environ.items()}, {})


Shown = Callable[[Bench], Awaitable[None]]
TABLE: dict[tuple[str, ...], Shown] = {}


def shows(*names: str) -> Callable[[Shown], Shown]:
    """Registers a function that tests these settings."""

    def enter(function: Shown) -> Shown:
        TABLE[names] = function
        return function

    return enter


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    async with contextlib.AsyncExitStack() as stack:
        yield Bench(tmp_path, monkeypatch, stack)


# --- the service -----------------------------------------------------------------------------------------------------
@shows("HOST", "PORT", "TOKEN")
async def _address_and_token(bench: Bench) -> None:
    (bench.directory / "models.yaml").write_text("models: {}")
    port = free_port()
    environ = {"INFERENCE_HOST": "127.0.0.2", "INFERENCE_PORT": str(port), "INFERENCE_TOKEN": "known"}
    argv = [sys.executable, "-m", "inference", "--config-dir", str(bench.directory)]
    service = OtherAddress(argv, private_env(bench.directory, environ), bench.directory, port)
    try:
        await asyncio.to_thread(service.start)
        assert http_status(f"http://127.0.0.1:{port}/livez") is None
        assert http_status(f"{service.url}/v1/models") == 401
        asking = urllib.request.Request(f"{service.url}/v1/models", headers={"authorization": "Bearer known"})
        with urllib.request.urlopen(asking, timeout=5) as answer:
            assert answer.status == 200
    finally:
        service.kill()


@shows("NODE")
async def _name(bench: Bench) -> None:
    epochs = set()
    for _ in range(2):
        service = await bench.start({"a": {}}, NODE="rack-1")
        health = (await ask(service.app, "GET", "/health", key=None)).body
        snapshot, models = service.authority.snapshot(), (await ask(service.app, "GET", "/v1/models")).body
        for found in (health, snapshot, models):
            assert (found["node"], found["epoch"]) == ("rack-1", service.authority.identity["epoch"])
        epochs.add(health["epoch"])
    assert len(epochs) == 2, "each start has its own epoch"
    assert bench.configured().settings.node_name == socket.gethostname()
    with pytest.raises(ConfigError, match="INFERENCE_NODE"):
        bench.configured(NODE="two words")


@shows("ADMIN_KEY")
async def _admin_key(bench: Bench) -> None:
    service = await bench.start({"a": {}}, ADMIN_KEY="admin")
    assert (await ask(service.app, "POST", "/models/a/unload", key="token")).status == 403
    assert (await ask(service.app, "POST", "/models/a/unload", key="admin")).status == 200


@shows("TLS_CERTIFICATE", "TLS_KEY", "TLS_CLIENT_CA")
async def _tls(bench: Bench) -> None:
    """`test_inference_tls.py` tests connections."""
    for name in ("TLS_KEY", "TLS_CLIENT_CA"):
        with pytest.raises(ConfigError, match=f"INFERENCE_{name}"):
            bench.configured(**{name: "file.pem"})
    settings = bench.configured(TLS_CERTIFICATE="c.pem", TLS_KEY="k.pem", TLS_CLIENT_CA="ca.pem").settings
    assert (settings.scheme, settings.tls_client_ca) == ("https", Path("ca.pem"))


@shows("MODELS_DIR")
async def _base_directory(bench: Bench) -> None:
    (bench.directory / "here").mkdir()
    (bench.directory / "here" / "x.gguf").write_bytes(b"GGUF")
    config = bench.configured("models: {a: {path: x.gguf}}", MODELS_DIR=str(bench.directory / "here"))
    assert config.models["a"].path == bench.directory / "here" / "x.gguf"


@shows("BACKEND")
async def _backend(bench: Bench) -> None:
    assert bench.configured(BACKEND="llamacpp").settings.backend == "llamacpp"
    with pytest.raises(ConfigError, match="INFERENCE_BACKEND"):
        bench.configured(BACKEND="vllm")


@shows("DRAIN_SECONDS")
async def _drain_time(bench: Bench) -> None:
    service, model = await bench.loaded(DRAIN_SECONDS="0.1")
    assert await service.authority.ask(model).wait(5)  # a request without an end
    await asyncio.wait_for(service.authority.unload(model), 10)
    assert model.running is None


@shows("MAX_BODY_MB")
async def _body_limit(bench: Bench) -> None:
    service = await bench.start({"a": {}}, MAX_BODY_MB="0.001")
    answer = await ask(service.app, "POST", "/v1/completions", {"model": "a", "prompt": "x" * 2000})
    assert (answer.status, answer.body["error"]["code"]) == (413, "body_too_large")


# --- what models do not say themselves -------------------------------------------------------------------------------
@shows(
    "GPU_LAYERS", "CONTEXT_LENGTH", "PARALLEL", "KV_TYPE", "BATCH", "UBATCH", "THREADS", "FLASH_ATTENTION", "SWA_FULL",
    "KV_CHECKPOINTS", "KV_CELLS", "EXPERTS", "SPECULATION", "SPLIT_MODE",
)  # fmt: skip
async def _grant_of_the_worker(bench: Bench) -> None:
    other = {
        "GPU_LAYERS": "3", "CONTEXT_LENGTH": "777", "PARALLEL": "3", "KV_TYPE": "q8_0", "BATCH": "128", "UBATCH": "64",
        "THREADS": "1", "SWA_FULL": "true", "KV_CHECKPOINTS": "3MiB",
    }  # fmt: skip
    granted = await bench.grant(**other)
    assert (granted["swa_full"], granted["checkpoint_bytes"]) == (True, 3 * 2**20)
    assert (granted["gpu_layers"], granted["context_length"], granted["parallel"], granted["kv_type"]) == (
        3,
        777,
        3,
        "q8_0",
    )
    assert (granted["batch"], granted["ubatch"], granted["threads"], granted["flash_attention"]) == (128, 64, 1, True)
    assert [(await bench.grant(**it))["speculation"] for it in ({}, {"SPECULATION": "ngram"})] == ["off", "ngram"]
    assert [(await bench.grant(**it))["split_mode"] for it in ({}, {"SPLIT_MODE": "row"})] == ["layer", "row"]
    assert (await bench.grant(FLASH_ATTENTION="false"))["flash_attention"] is False
    assert [(await bench.grant(EXPERTS=value))["host_expert_layers"] for value in ("auto", "7")] == [0, 7]
    assert [(await bench.grant(**pool))["kv_cells"] for pool in ({}, {"KV_CELLS": "5000"})] == [None, 5000]


@shows("KV_ENABLED", "KV_RAM_GB", "KV_DISK_GB", "KV_DIR", "KV_POLICY", "KV_THRESHOLD", "KV_PREFETCH")
async def _stored_sequences(bench: Bench) -> None:
    other = {
        "KV_RAM_GB": "0.03125", "KV_DISK_GB": "1.5", "KV_DIR": "/elsewhere", "KV_POLICY": "priority",
        "KV_THRESHOLD": "0.5", "KV_PREFETCH": "false",
    }  # fmt: skip
    assert (await bench.grant(**other))["kv"] == {
        "ram_bytes": 32 * MIB, "disk_bytes": 3 * 2**29, "directory": "/elsewhere", "policy": "priority",
        "threshold": 0.5, "prefetch": False,
    }  # fmt: skip
    plain = (await bench.grant())["kv"]
    assert (plain["disk_bytes"], plain["directory"], plain["policy"]) == (0, None, "hybrid")
    assert (await bench.grant(KV_DISK_GB="1"))["kv"]["directory"].endswith("/state/kv")
    off = (await bench.grant(KV_ENABLED="false", **other))["kv"]
    assert (off["ram_bytes"], off["disk_bytes"], off["directory"]) == (0, 0, None)


@shows("GPU_INDEX")
async def _default_device(bench: Bench) -> None:
    for index in ("0", "1"):
        _, model = await bench.loaded(accelerator=FakeAccelerator(2), GPU_INDEX=index)
        assert model.running is not None
        assert model.running.device.id == f"gpu-{index}"


@shows("OOM_POLICY")
async def _oom_policy(bench: Bench) -> None:
    assert not await bench.fits(2000, on=FakeAccelerator())
    for policy in ("cpu", "cleanup,cpu"):
        assert await bench.fits(2000, on=FakeAccelerator(), OOM_POLICY=policy)


@shows("FIT", "MIN_CONTEXT")
async def _fit(bench: Bench) -> None:
    """The model is too large with 4,096 tokens, and fits with fewer."""
    for environ, context in (({}, None), ({"FIT": "context"}, 2048), ({"FIT": "context", "MIN_CONTEXT": "4000"}, None)):
        service = await bench.start({"a": {}}, accelerator=FakeAccelerator(), estimator=CacheEstimator(1024), **environ)
        model = service.authority.resolve("a")
        if context is None:
            with pytest.raises(MemoryLimitExceededError):
                await service.authority.load(model, 10)
        else:
            await service.authority.load(model, 10)
            assert service.authority.status(model).context_length >= context


@shows("MODEL_IDLE_TIMEOUT_SECONDS")
async def _idle_timeout(bench: Bench) -> None:
    _, model = await bench.loaded(MODEL_IDLE_TIMEOUT_SECONDS="0.1", ENABLE_CPU_OFFLOAD="false")
    await model.becomes(ModelState.COLD)


@shows("ENABLE_CPU_OFFLOAD")
async def _retention(bench: Bench) -> None:
    for enabled, state in (("true", ModelState.WARM), ("false", ModelState.COLD)):
        service, model = await bench.loaded(ENABLE_CPU_OFFLOAD=enabled, MODEL_IDLE_TIMEOUT_SECONDS="0.1")
        await model.becomes(state)
        assert len(service.authority.offloaded()) == (enabled == "true")


@shows("WARM_CHECKPOINT")
async def _checkpoints(bench: Bench) -> None:
    stub = CudaStub(bench.directory / "cuda")
    for name, value in stub.env.items():
        bench.patch.setenv(name, value)
    for value, mechanism in (("off", "resident"), ("simulated", "resident"), ("auto", "checkpoint")):
        service, model = await bench.loaded(accelerator=FakeAccelerator(), WARM_CHECKPOINT=value)
        wanted = None if value == "auto" else f"INFERENCE_WARM_CHECKPOINT is {value}"
        await service.authority.shell.reached(lambda state: "cuda" in state.devices.suspension)
        assert service.authority.state.devices.suspension["cuda"] == wanted
        await service.authority.offload(model)
        assert service.authority.offloaded()[0]["mechanism"] == mechanism


@shows("MIN_RESIDENCY_SECONDS")
async def _min_residency(bench: Bench) -> None:
    models: dict[str, dict[str, Any]] = {"a": {"min_residency": None}}
    for seconds, eviction_state in (("0", EvictionState.IDLE), ("1000", EvictionState.YOUNG)):
        service, model = await bench.loaded(models, MIN_RESIDENCY_SECONDS=seconds)
        assert service.authority.state.eviction_state(model.record, service.authority.now) is eviction_state


# --- memory ----------------------------------------------------------------------------------------------------------
@shows("MEMORY_LIMIT_GB")
async def _total_limit(bench: Bench) -> None:
    assert await bench.fits(100, on=None, MEMORY_LIMIT_GB="0.1")
    assert not await bench.fits(100, on=None, MEMORY_LIMIT_GB="0.09")


@shows("GPU_MEMORY_MAX_PERCENT")
async def _accelerator_share(bench: Bench) -> None:
    assert await bench.fits(850, on=FakeAccelerator())
    assert not await bench.fits(850, on=FakeAccelerator(), GPU_MEMORY_MAX_PERCENT="0.8")


@shows("CPU_MEMORY_MAX_PERCENT")
async def _host_share(bench: Bench) -> None:
    assert await bench.fits(100, on=None)
    assert not await bench.fits(100, on=None, CPU_MEMORY_MAX_PERCENT="0.00001")


@shows("GPU_MEMORY_LIMIT_MB")
async def _accelerator_bytes(bench: Bench) -> None:
    assert await bench.fits(300, on=FakeAccelerator(), GPU_MEMORY_LIMIT_MB="300")
    assert not await bench.fits(300, on=FakeAccelerator(), GPU_MEMORY_LIMIT_MB="299")


@shows("GPU_MEMORY_RESERVE_MB")
async def _reserve(bench: Bench) -> None:
    whole = {"GPU_MEMORY_MAX_PERCENT": "1"}
    assert await bench.fits(980, on=FakeAccelerator(), GPU_MEMORY_RESERVE_MB="0", **whole)
    assert not await bench.fits(980, on=FakeAccelerator(), GPU_MEMORY_RESERVE_MB="30", **whole)


@shows("MAX_MODELS", "MAX_MODELS_PER_DEVICE")
async def _number_of_models(bench: Bench) -> None:
    for name, most in (("MAX_MODELS", 1), ("MAX_MODELS_PER_DEVICE", 1), ("MAX_MODELS", 2)):
        service, _ = await bench.loaded({"a": {}, "b": {}}, ENABLE_CPU_OFFLOAD="false", **{name: str(most)})
        await service.authority.load(service.authority.resolve("b"), 10)
        assert sum(model.running is not None for model in service.authority.models.values()) == most


@shows("FORCE_CPU_MODE")
async def _forced_cpu_mode(bench: Bench) -> None:
    for forced, device in (("false", "gpu-0"), ("true", CPU)):
        _, model = await bench.loaded(accelerator=FakeAccelerator(), FORCE_CPU_MODE=forced)
        assert model.running is not None
        assert model.running.device.id == device


@shows("DEVICES")
async def _devices(bench: Bench) -> None:
    for value, expected in (("cpu", ["cpu"]), ("sim:64MiB", ["gpu-0", "cpu"])):
        inventory = Inventory.of(bench.configured(DEVICES=value).settings)
        await inventory.start()
        try:
            assert [reading.id for reading in inventory.measured()] == expected
        finally:
            await inventory.close()


@shows("ENABLE_LAZY_MODEL_LOADING")
async def _load_at_start(bench: Bench) -> None:
    lazy = await bench.start({"a": {}, "b": {}})
    eager = await bench.start({"a": {}, "b": {}}, ENABLE_LAZY_MODEL_LOADING="false")
    await eager.authority.reached(lambda: all(model.loads for model in eager.authority.models.values()))
    assert not any(model.loads for model in lazy.authority.models.values())


# --- waiting ---------------------------------------------------------------------------------------------------------
@shows("QUEUE_HIGH", "QUEUE_NORMAL", "QUEUE_LOW")
async def _queue_size(bench: Bench) -> None:
    for priority in Priority:
        assert not await bench.queue_takes(priority, **{f"QUEUE_{priority.upper()}": "0"})
        assert await bench.queue_takes(
            priority, **{f"QUEUE_{other.upper()}": "0" for other in Priority if other != priority}
        )


@shows("ACQUIRE_TIMEOUT_SECONDS")
async def _queue_timeout(bench: Bench) -> None:
    estimator = FakeEstimator()
    estimator.gate = asyncio.Event()
    service = await bench.start({"a": {}}, estimator=estimator, ACQUIRE_TIMEOUT_SECONDS="0.05")
    with pytest.raises(DeadlineExceeded):
        await service.authority.ask(service.authority.resolve("a")).wait(10)
    estimator.gate.set()


@shows("ESTIMATE_TIMEOUT_SECONDS")
async def _estimate_timeout(bench: Bench) -> None:
    path = tiny_gguf.generative()
    for number, (environ, source) in enumerate((({"ESTIMATE_TIMEOUT_SECONDS": "0.01"}, "header"), ({}, "llama.cpp"))):
        config = bench.configured(f"models: {{a: {{path: {path}}}}}", FORCE_CPU_MODE="true", **environ)
        state = StateDir.from_env({"HEADGATE_STATE_DIR": str(bench.directory / f"state-{number}")})
        (reading,) = CpuProbe().readings()
        estimator = Estimator(state, seconds=config.settings.estimate_timeout_seconds)
        estimate = await estimator.get(config.models["a"], reading)
        assert (estimate.source, estimate.architecture) == (source, "llama")


# --- supervision -----------------------------------------------------------------------------------------------------
@shows("LOAD_TIMEOUT_SECONDS")
async def _load_timeout(bench: Bench) -> None:
    assert "not loaded within" in await bench.failure({"load_seconds": 60}, LOAD_TIMEOUT_SECONDS="0.3")


@shows("WORKER_START_SECONDS")
async def _hello_timeout(bench: Bench) -> None:
    bench.patch.setattr(authority_rig, "COMMAND", ("/bin/sleep", "60"))
    assert "no sign of life" in await bench.failure({}, WORKER_START_SECONDS="0.3")


@shows("WORKER_SILENCE_SECONDS")
async def _silence_timeout(bench: Bench) -> None:
    assert "silent for" in await bench.failure({"silent_after": 0.1}, WORKER_SILENCE_SECONDS="0.8")


@shows("STEP_TIMEOUT_SECONDS", "STEP_TIMEOUT_SECONDS_PER_TOKEN")
async def _step_timeout(bench: Bench) -> None:
    for environ in ({"STEP_TIMEOUT_SECONDS": "59"}, {"STEP_TIMEOUT_SECONDS_PER_TOKEN": "0"}):
        error = await bench.failure({"step_seconds": LONG_STEP}, **environ)
        assert "takes longer than 60 s" in error


# --- pressure --------------------------------------------------------------------------------------------------------
@shows("PRESSURE_MODERATE", "PRESSURE_HIGH", "PRESSURE_CRITICAL", "PRESSURE_EMERGENCY")
async def _pressure_levels(bench: Bench) -> None:
    levels = ("moderate", "high", "critical", "emergency")
    for number, level in enumerate(levels, 1):
        accelerator = FakeAccelerator()
        accelerator.used_bytes = 300 * MIB
        environ = {f"PRESSURE_{name.upper()}": "0.2" for name in levels[:number]}
        service = await bench.start({"a": {}}, accelerator=accelerator, **environ)
        found = (await ask(service.app, "GET", "/memory/stats")).body
        assert found["per_device"]["gpu-0"]["pressure_level"] == level


@shows("ENABLE_MEMORY_GOVERNOR")
async def _pressure_governor(bench: Bench) -> None:
    """Other programs take the memory of a device with an idle model."""
    more = {"PRESSURE_CHECK_INTERVAL_SECONDS": "0.1", "ENABLE_CPU_OFFLOAD": "false"}
    for enabled in ("true", "false"):
        accelerator = SharedDevice()
        service, model = await bench.loaded(accelerator=accelerator, ENABLE_MEMORY_GOVERNOR=enabled, **more)
        accelerator.service, accelerator.foreign_mib = service, 850
        if enabled == "true":
            await model.becomes(ModelState.COLD)
            continue
        await service.authority.reached(lambda service=service: _level(service) == "critical")
        assert model.state is ModelState.READY


def _level(service: Service) -> str:
    """The pressure of the device that was measured last."""
    return str(service.authority.state.pressure.history[-1].devices["gpu-0"].pressure_level)


@shows("PRESSURE_EAGER", "EVICTION_IDLE_THRESHOLD_SECONDS")
async def _eager_eviction(bench: Bench) -> None:
    """An idle model is evicted at MODERATE, although no model waits and foreign use does not grow, with both only."""
    more = {"PRESSURE_CHECK_INTERVAL_SECONDS": "0.1", "ENABLE_CPU_OFFLOAD": "false"}
    both = {"PRESSURE_EAGER": "true", "EVICTION_IDLE_THRESHOLD_SECONDS": "0"}
    for environ in (both, *({name: value} for name, value in both.items())):
        accelerator = SharedDevice(foreign_mib=650)
        service = await bench.start({"a": {}}, accelerator=accelerator, **more, **environ)
        accelerator.service, model = service, service.authority.resolve("a")
        await service.authority.load(model, 10)
        if environ is both:
            await model.becomes(ModelState.COLD)
            continue
        await service.clock.advance(2.0)
        assert _level(service) == "moderate"
        assert model.state is ModelState.READY


@shows("PRESSURE_CHECK_INTERVAL_SECONDS")
async def _pressure_interval(bench: Bench) -> None:
    service = await bench.start({"a": {}}, accelerator=FakeAccelerator(), PRESSURE_CHECK_INTERVAL_SECONDS="0.1")
    await service.authority.reached(lambda: len(service.authority.state.pressure.history) >= 3)
    service = await bench.start({"a": {}}, accelerator=FakeAccelerator())
    await service.clock.advance(0.9)
    assert len(service.authority.state.pressure.history) == 1


@shows("ENABLE_MEMORY_ALERTS")
async def _alerts(bench: Bench) -> None:
    for enabled in ("true", "false"):
        accelerator = FakeAccelerator()
        accelerator.used_bytes = 950 * MIB
        service = await bench.start({"a": {}}, accelerator=accelerator, ENABLE_MEMORY_ALERTS=enabled)
        found = (await ask(service.app, "GET", "/memory/stats")).body
        assert bool(found["alerts"]) is (enabled == "true")


# --- the table --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("names", TABLE, ids=lambda names: "-".join(names))
async def test_setting_has_an_effect(names: tuple[str, ...], bench: Bench) -> None:
    await TABLE[names](bench)


def test_every_setting_has_a_test() -> None:
    shown = [PREFIX + name for names in TABLE for name in names]
    assert sorted(shown) == sorted(environment_names())
