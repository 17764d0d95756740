"""A foreign process takes memory of a simulated GPU: an idle model goes to host memory, and nobody's request fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.devices.simgpu.control import SOCKET_NAME, Control
from inference.osapi import socket_directory
from tests.rigs.processes import wait_until
from tests.rigs.stack import Stack, chat_body

MODELS = """
models:
  demo: {path: bundled:demo, context_length: 1024, parallel: 1, min_residency: 0}
  demo-mini: {path: bundled:demo-mini, context_length: 512, parallel: 1, min_residency: 0}
"""
TOTAL = 400 * 2**20


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    started = Stack(
        tmp_path,
        models=MODELS,
        inference_env={
            "INFERENCE_DEVICES": "sim:400MiB",
            "INFERENCE_WARM_CHECKPOINT": "off",
            "INFERENCE_PRESSURE_CHECK_INTERVAL_SECONDS": "0.5",
            "INFERENCE_EVICTION_IDLE_THRESHOLD_SECONDS": "0.1",
        },
    )
    started.inference.start(wait_for="/readyz")
    yield started
    started.kill()


def chat(stack: Stack, model: str) -> Any:
    return stack.ask("/v1/chat/completions", chat_body("hello", model, max_tokens=4), direct=True)["choices"]


def test_idle_models_make_room_for_others_before_anything_fails(stack: Stack) -> None:
    assert chat(stack, "demo")
    with Control(socket_directory(stack.state) / SOCKET_NAME) as rig:
        used = rig.tell("status")["gpu-0"]["used_bytes"]
        assert used > 0
        rig.tell("foreign", "gpu-0", bytes=int(TOTAL * 0.85) - used)
        (record,) = wait_until("it left", lambda: stack.ask("/memory/evictions", direct=True)["evictions"])
        assert (record["model_name"], record["reason"], record["action"]) == ("demo", "pressure", "offload")
        assert "gpu-0 is at high: 340.0 MiB of 400.0 MiB are in use" in record["explanation"][0]
        assert record["memory_freed_mb"] > 0
        status = rig.tell("status")["gpu-0"]
        assert status["used_bytes"] == status["foreign_bytes"], "nothing of ours is left on the device"
        (kept,) = wait_until("it is warm", lambda: stack.ask("/memory/offloaded", direct=True)["offloaded"])
        assert (kept["model_key"], kept["original_device"]) == ("demo", "gpu-0")
        rig.tell("foreign", "gpu-0", bytes=0)
        assert chat(stack, "demo")
        samples = stack.ask("/memory/history", direct=True)["samples"]
        assert {"low", "high"} <= {sample["devices"]["gpu-0"]["pressure_level"] for sample in samples}


def test_a_service_that_starts_beside_a_full_device_serves_once_there_is_room(stack: Stack) -> None:
    with Control(socket_directory(stack.state) / SOCKET_NAME) as rig:
        rig.tell("foreign", "gpu-0", bytes=int(TOTAL * 0.95))
        wait_until("it is seen", lambda: level(stack) == "critical")
        plan = stack.ask("/memory/plan", {"model": "demo"}, direct=True)
        assert plan["result"] == "CANT_ACCOMMODATE"
        assert plan["short"][0]["short_bytes"] > 0
        rig.tell("foreign", "gpu-0", bytes=0)
        wait_until("it is over", lambda: level(stack) == "low")
        assert chat(stack, "demo-mini")


def level(stack: Stack) -> str:
    return str(stack.ask("/memory/stats", direct=True)["per_device"]["gpu-0"]["pressure_level"])
