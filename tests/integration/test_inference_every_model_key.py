"""Every key of a model in models.yaml has an effect: one test each; a key without a test fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headgate.shared.state_directory import StateDir
from inference.devices.device import CPU
from inference.errors import MemoryLimitExceededError
from inference.estimate.estimator import Estimator
from inference.protocol import ModelState
from inference.settings import ModelEntry
from tests.rigs import tiny_gguf
from tests.rigs.authority_rig import MIB, CacheEstimator, FakeAccelerator, FakeEstimator, Start

Shown = Callable[[Path, Start], Awaitable[None]]
TABLE: dict[tuple[str, ...], Shown] = {}


def shows(*keys: str) -> Callable[[Shown], Shown]:
    """Registers a function that tests these keys."""

    def enter(function: Shown) -> Shown:
        TABLE[keys] = function
        return function

    return enter


async def load(service: Any, *names: str) -> list[tuple[str, ...]]:
    """The devices of each model, loaded one after the other."""
    for name in names:
        await service.authority.load(service.authority.resolve(name), 10)
    return [service.authority.status(service.authority.resolve(name)).devices for name in names]


@shows(
    "path", "context_length", "gpu_layers", "parallel", "kv_type", "batch", "ubatch", "threads", "flash_attention",
    "lora", "mmproj", "capabilities", "swa_full", "kv_cells", "experts", "split_mode", "speculation", "draft",
)  # fmt: skip
async def _grant_of_the_worker(directory: Path, start: Start) -> None:
    other = directory / "other.gguf"
    other.write_bytes(b"GGUF")
    settings_of: dict[str, dict[str, Any]] = {
        "a": {"path": str(other), "context_length": 777, "gpu_layers": 3, "parallel": 3, "kv_type": "q8_0"},
        "b": {"batch": 128, "ubatch": 64, "threads": 1, "flash_attention": False, "swa_full": True, "experts": 3},
        "c": {"lora": [str(other)], "mmproj": str(other), "capabilities": ["chat"], "kv_cells": 5000},
        "d": {"speculation": "ngram", "split_mode": "row"},
        "e": {"draft": str(other)},
    }
    behavior = {name: {"grant_file": str(directory / f"{name}.json")} for name in [*settings_of, "plain"]}
    service = await start({**settings_of, "plain": {}}, behavior, accelerator=FakeAccelerator())
    await load(service, *behavior)
    granted = {name: json.loads((directory / f"{name}.json").read_text()) for name in behavior}
    settings_of["b"]["host_expert_layers"] = settings_of["b"].pop("experts")
    for name, keys in settings_of.items():
        assert {key: granted[name][key] for key in keys} == keys
        assert all(granted["plain"][key] != value for key, value in keys.items())


@shows("kv_checkpoints")
async def _checkpoints(directory: Path, start: Start) -> None:
    file = directory / "a.json"
    service = await start({"a": {"kv_checkpoints": "3MiB"}}, {"a": {"grant_file": str(file)}})
    await load(service, "a")
    assert json.loads(file.read_text())["checkpoint_bytes"] == 3 * MIB


@shows("aliases")
async def _aliases(directory: Path, start: Start) -> None:
    service = await start({"a": {"aliases": ["other"]}, "b": {}})
    assert service.authority.resolve("other") == service.authority.resolve("a")


@shows("gpu_index", "dedicated")
async def _device_and_dedicated(directory: Path, start: Start) -> None:
    """Without a setting the fuller device is used, so that the other one stays empty."""
    models: dict[str, dict[str, Any]] = {"first": {"gpu_index": 1}, "alone": {"dedicated": True}, "last": {}}
    service = await start(models, accelerator=FakeAccelerator(2))
    assert await load(service, *models) == [("gpu-1",), ("gpu-0",), ("gpu-1",)]


@shows("replicas")
async def _replicas(directory: Path, start: Start) -> None:
    service = await start({"a": {"replicas": 2}}, accelerator=FakeAccelerator(2))
    devices = await load(service, "a", "a@2")
    assert [*map(sorted, devices)] in ([["gpu-0", "gpu-1"], ["gpu-1"]], [["gpu-0", "gpu-1"], ["gpu-0"]])


@shows("idle_timeout", "warm")
async def _idle_timeout_and_retention(directory: Path, start: Start) -> None:
    models: dict[str, dict[str, Any]] = {"a": {"idle_timeout": 0.1}, "b": {"idle_timeout": 0.1, "warm": False}, "c": {}}
    service = await start(models)
    await load(service, *models)
    a, b, c = (service.authority.resolve(name) for name in models)
    await service.authority.reached(lambda: (a.state, b.state) == (ModelState.WARM, ModelState.COLD))
    assert c.state is ModelState.READY


@shows("min_residency", "pinned")
async def _protection_from_eviction(directory: Path, start: Start) -> None:
    """The evictable model was used last. Memory of other programs is not counted."""
    models: dict[str, dict[str, Any]] = {"young": {"min_residency": 1000}, "pinned": {"pinned": True}, "a": {}, "b": {}}
    service = await start(models, MEMORY_LIMIT_GB="0.35", ENABLE_CPU_OFFLOAD="false", ENABLE_MEMORY_GOVERNOR="false")
    await load(service, "young", "pinned")
    await service.clock.advance(200)
    await load(service, "a", "b")
    assert [name for name, model in service.authority.models.items() if model.running] == ["young", "pinned", "b"]


@shows("oom_policy")
async def _oom_policy(directory: Path, start: Start) -> None:
    estimator = FakeEstimator()
    estimator.sizes = {"a": 2000, "b": 2000}
    models = {"a": {"oom_policy": "cpu"}, "b": {}}
    service = await start(models, accelerator=FakeAccelerator(), estimator=estimator)
    assert await load(service, "a") == [(CPU,)]
    with pytest.raises(MemoryLimitExceededError):
        await load(service, "b")


@shows("fit", "min_context")
async def _fit(directory: Path, start: Start) -> None:
    """Half of the context needs 300 MiB less, but only one model may have less than 4,096 tokens."""
    models = {"a": {"fit": "context", "min_context": 1024}, "b": {"fit": "context", "min_context": 4096}, "c": {}}
    service = await start(models, accelerator=FakeAccelerator(), estimator=CacheEstimator(1024))
    assert await load(service, "a") == [("gpu-0",)]
    status = service.authority.status(service.authority.resolve("a"))
    assert 1024 <= status.context_length < 4096
    assert [step["step"] for step in status.steps] == ["fit"]
    for name in ("b", "c"):
        with pytest.raises(MemoryLimitExceededError):
            await load(service, name)


@shows("memory_overhead")
async def _overhead(directory: Path, start: Start) -> None:
    """Instead of the 64 MiB of host memory that every worker reserves."""
    same = {"path": str(tiny_gguf.generative()), "context_length": 256, "parallel": 1}
    state = StateDir.from_env({"HEADGATE_STATE_DIR": str(directory / "estimates")})
    service = await start(
        {"a": {**same, "memory_overhead": "100MiB"}, "b": same}, estimator=Estimator(state, seconds=60)
    )
    await asyncio.gather(load(service, "a"), load(service, "b"))
    reserved = {name: service.authority.resolve(name).running.placement.need[CPU] for name in "ab"}
    assert reserved["a"] - reserved["b"] == 36 * MIB


@pytest.mark.parametrize("keys", TABLE, ids=lambda keys: "-".join(keys))
async def test_key_has_an_effect(keys: tuple[str, ...], tmp_path: Path, start: Start) -> None:
    await TABLE[keys](tmp_path, start)


def test_every_key_has_a_test() -> None:
    assert sorted(key for keys in TABLE for key in keys) == sorted(ModelEntry.model_fields)
