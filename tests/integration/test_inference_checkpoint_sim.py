"""Checkpoints on simulated devices with real workers: a suspended model is restored exactly, or becomes cold."""

from __future__ import annotations

import os
import signal
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.devices.simgpu.control import SOCKET_NAME, Control, SimulatorError
from inference.workers.os_api import socket_directory
from tests.rigs.processes import descendants_of, wait_until
from tests.rigs.stack import Stack, chat_body

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="checkpoints are Linux's")
MIB = 2**20
MODELS = """
models:
  demo: {path: bundled:demo, context_length: 2048, parallel: 2, min_residency: 0}
"""
STORY = "Once upon a time there was a little girl. She liked to play in the garden with her dog. " * 8
BODY = chat_body(STORY, max_tokens=16)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    environment = {"INFERENCE_DEVICES": "sim:300MiB", "INFERENCE_PRESSURE_CHECK_INTERVAL_SECONDS": "0.2"}
    started = Stack(tmp_path_factory.mktemp("stack"), models=MODELS, inference_env=environment)
    started.inference.start(wait_for="/readyz")
    yield started
    started.kill()


def device_status(stack: Stack, do: str = "status", **amount: float) -> dict[str, Any]:
    """The counts of the device after a command."""
    with Control(socket_directory(stack.state) / SOCKET_NAME) as rig:
        return rig.send(do, "gpu-0", **amount)["gpu-0"]


def answered(stack: Stack) -> tuple[str, int]:
    """The answer of the model, and how much of the prompt was cached."""
    answer = stack.ask("/v1/chat/completions", BODY, direct=True)
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def suspended(stack: Stack) -> tuple[str, int]:
    """An answer of the model, and the pid of its process, which is then suspended."""
    first, _found = answered(stack)
    stack.ask("/models/demo/offload", {}, direct=True)
    (kept,) = stack.ask("/memory/offloaded", direct=True)["offloaded"]
    assert (kept["mechanism"], kept["original_device"]) == ("checkpoint", "gpu-0")
    return first, stack.worker_pid("demo")


def test_suspended_model_uses_no_device_memory_and_is_restored_exactly(stack: Stack) -> None:
    """The same process and answer with a cached prompt; its bytes are booked on the host in between."""
    answered(stack)
    used = device_status(stack)["used_bytes"]
    first, pid = suspended(stack)
    there = device_status(stack)
    assert (there["used_bytes"], there["suspended_bytes"]) == (0, used)
    wait_until("the booking on the device is released", lambda: devices(stack)["gpu-0"]["allocated_mb"] == 0)
    assert devices(stack)["gpu-0"]["used_mb"] == 0
    assert devices(stack)["cpu"]["allocated_mb"] >= used / MIB
    records = stack.ask("/memory/evictions", direct=True)["evictions"]
    assert (records[-1]["model_name"], records[-1]["action"]) == ("demo", "offload")
    again, found = answered(stack)
    assert (again, stack.worker_pid("demo"), device_status(stack)["used_bytes"]) == (first, pid, used)
    assert found > 100
    assert stack.ask("/memory/offloaded", direct=True)["offloaded"] == []


def devices(stack: Stack) -> dict[str, dict[str, Any]]:
    return dict(stack.ask("/memory/stats", direct=True)["per_device"])


def test_suspended_model_without_room_is_dropped_and_refused(stack: Stack) -> None:
    """Another program took the device; when it releases it, the model is loaded and suspended again."""
    first, _pid = suspended(stack)
    device_status(stack, "foreign", bytes=290 * MIB)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        answered(stack)
    assert device_status(stack)["suspended_bytes"] == 0
    device_status(stack, "heal")
    wait_until("the model answers again", lambda: is_answered(stack, first))
    suspended(stack)


def is_answered(stack: Stack, wanted: str) -> bool:
    try:
        return answered(stack)[0] == wanted
    except urllib.error.HTTPError:
        return False


def test_killed_simulator_drops_its_suspended_models(stack: Stack) -> None:
    """A new simulator has an empty device, and the model is loaded from its file."""
    wait_until("the model answers", lambda: is_answered(stack, answered(stack)[0]))
    first, _pid = suspended(stack)
    (simulator,) = [pid for pid in family(stack.inference.pid) if "inference.devices.simgpu" in arguments(pid)]
    servers = descendants_of(simulator)
    os.kill(simulator, signal.SIGKILL)
    wait_until("the model is dropped", lambda: stack.model("demo")["state"] == "cold")
    wait_until("its servers ended", lambda: not any(Path(f"/proc/{pid}").exists() for pid in servers))
    wait_until("the model answers again", lambda: is_answered(stack, first))


def test_killed_service_leaves_no_process(stack: Stack) -> None:
    """Neither the suspended worker nor the servers with its bytes remain."""
    suspended(stack)
    processes = family(stack.inference.pid)
    assert len(processes) >= 3
    stack.inference.kill()
    wait_until("all are gone", lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
    with pytest.raises(SimulatorError):
        device_status(stack)


def family(pid: int) -> list[int]:
    """All descendants of the process."""
    return [found for child in descendants_of(pid) for found in (child, *family(child))]


def arguments(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
