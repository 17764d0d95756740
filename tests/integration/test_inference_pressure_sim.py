"""Other programs use memory of a simulated GPU: idle models move to host memory, and a full device is reported."""

from __future__ import annotations

import json
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.devices.simgpu.control import SOCKET_NAME, Control
from inference.workers.os_api import socket_directory
from tests.rigs.demo_pair import MODELS, TOTAL_BYTES, demo_pair
from tests.rigs.processes import of_models, wait_until
from tests.rigs.stack import REPOSITORY, Stack, chat_body


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with demo_pair(tmp_path) as started:
        yield started


def chat(stack: Stack, model: str) -> Any:
    return stack.ask("/v1/chat/completions", chat_body("hello", model, max_tokens=4), direct=True)["choices"]


def test_idle_models_make_room_for_other_programs_before_a_failure(stack: Stack) -> None:
    assert chat(stack, "demo")
    with Control(socket_directory(stack.state) / SOCKET_NAME) as rig:
        used = rig.send("status")["gpu-0"]["used_bytes"]
        assert used > 0
        rig.send("foreign", "gpu-0", bytes=int(TOTAL_BYTES * 0.85) - used)
        (record,) = wait_until("the model left", lambda: stack.ask("/memory/evictions", direct=True)["evictions"])
        assert (record["model_name"], record["reason"], record["action"]) == ("demo", "pressure", "offload")
        assert "gpu-0 is at high: 340.0 MiB of 400.0 MiB are in use" in record["explanation"][0]
        assert record["memory_freed_mb"] > 0
        status = rig.send("status")["gpu-0"]
        assert status["used_bytes"] == status["foreign_bytes"], "the service uses nothing on the device"
        (kept,) = wait_until("the model is warm", lambda: stack.ask("/memory/offloaded", direct=True)["offloaded"])
        assert (kept["model_key"], kept["original_device"]) == ("demo", "gpu-0")
        rig.send("foreign", "gpu-0", bytes=0)
        assert chat(stack, "demo")
        samples = stack.ask("/memory/history", direct=True)["samples"]
        assert {"low", "high"} <= {sample["devices"]["gpu-0"]["pressure_level"] for sample in samples}


def test_service_that_starts_with_a_full_device_reports_it_and_serves_when_there_is_room(tmp_path: Path) -> None:
    """With 95 % in use at the start the service is ready, refuses with numbers, and leaves no process."""
    env = {"INFERENCE_DEVICES": "sim:400MiB", "INFERENCE_PRESSURE_CHECK_INTERVAL_SECONDS": "0.5"}
    env |= {"TAKEN_BYTES": str(int(TOTAL_BYTES * 0.95)), "PYTHONPATH": str(REPOSITORY)}
    stack = Stack(tmp_path, models=MODELS, inference_env=env)
    stack.inference.argv = [sys.executable, "-m", "tests.rigs.taken_gpu", *stack.inference.argv[3:]]
    try:
        stack.inference.start(wait_for="/readyz")
        assert level(stack) == "critical"
        assert "gpu-0 is at critical (low before): 380.0 MiB of 400.0 MiB are in use" in stack.inference.log
        assert stack.ask("/memory/history", direct=True)["samples"][0]["devices"]["gpu-0"]["foreign_mb"] == 380
        with pytest.raises(urllib.error.HTTPError) as unwell:
            stack.ask("/memory/health", direct=True)
        with unwell.value as answer:
            message = json.load(answer)["message"]
        assert (
            message == "gpu-0 is at critical pressure: 380 MiB of 400 MiB are in use, 380 MiB of it by other programs"
        )
        wait_until("the estimate ended", lambda: not of_models(stack.inference.pid))
        before = allocations(stack)
        with pytest.raises(urllib.error.HTTPError) as refused:
            chat(stack, "demo")
        with refused.value as answer:
            error = json.load(answer)["error"]
        assert (refused.value.code, error["code"]) == (503, "memory_limit_exceeded")
        short = error["headgate"]["devices"][0]
        assert (short["device"], short["short_bytes"]) == ("gpu-0", short["need_bytes"] - short["free_bytes"])
        assert 0 <= short["free_bytes"] < short["need_bytes"]
        assert allocations(stack) == before
        wait_until("no process remains", lambda: not of_models(stack.inference.pid))
        with Control(socket_directory(stack.state) / SOCKET_NAME) as rig:
            rig.send("foreign", "gpu-0", bytes=0)
            wait_until("the pressure is over", lambda: level(stack) == "low")
        assert chat(stack, "demo-mini")
    finally:
        stack.kill()


def level(stack: Stack) -> str:
    return str(stack.ask("/memory/stats", direct=True)["per_device"]["gpu-0"]["pressure_level"])


def allocations(stack: Stack) -> int:
    """All allocations on the device so far."""
    with Control(socket_directory(stack.state) / SOCKET_NAME) as rig:
        return int(rig.send("status")["gpu-0"]["allocations"])
