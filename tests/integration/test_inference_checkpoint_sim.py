"""Checkpoints on simulated devices, real workers and real bytes: who is suspended comes back as it was, or is cold."""

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
from tests.rigs.processes import children_of, wait_until
from tests.rigs.stack import Stack, chat_body

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="checkpoints are Linux's")
MIB = 2**20
MODELS = """
models:
  demo: {path: bundled:demo, context_length: 2048, parallel: 2, min_residency: 0}
"""
STORY = "Once upon a time there was a little girl who liked to play in the garden with her dog. " * 8
BODY = chat_body(STORY, max_tokens=16)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    environment = {"INFERENCE_DEVICES": "sim:300MiB", "INFERENCE_PRESSURE_CHECK_INTERVAL_SECONDS": "0.2"}
    started = Stack(tmp_path_factory.mktemp("stack"), models=MODELS, inference_env=environment)
    started.inference.start(wait_for="/readyz")
    yield started
    started.kill()


def told(stack: Stack, do: str = "status", **amount: float) -> dict[str, Any]:
    """What the device itself counts, after a command."""
    with Control(socket_directory(stack.state) / SOCKET_NAME) as rig:
        return rig.tell(do, "gpu-0", **amount)["gpu-0"]


def answered(stack: Stack) -> tuple[str, int]:
    """The model's answer, and how much of the prompt was found computed."""
    said = stack.ask("/v1/chat/completions", BODY, direct=True)
    return said["choices"][0]["message"]["content"], said["usage"]["prompt_tokens_details"]["cached_tokens"]


def suspended(stack: Stack) -> tuple[str, int]:
    """An answer of the model, and its process, which is suspended now."""
    first, _found = answered(stack)
    stack.ask("/models/demo/offload", {}, direct=True)
    (kept,) = stack.ask("/memory/offloaded", direct=True)["offloaded"]
    assert (kept["mechanism"], kept["original_device"]) == ("checkpoint", "gpu-0")
    return first, stack.worker_pid("demo")


def test_a_suspended_model_holds_nothing_of_its_device_and_comes_back_as_it_was(stack: Stack) -> None:
    """The same process, the same answer, its prompt found computed; its bytes are booked on the host meanwhile."""
    answered(stack)
    used = told(stack)["used_bytes"]
    first, pid = suspended(stack)
    there = told(stack)
    assert (there["used_bytes"], there["suspended_bytes"]) == (0, used)
    wait_until("the device is free in the books", lambda: devices(stack)["gpu-0"]["allocated_mb"] == 0)
    assert devices(stack)["gpu-0"]["used_mb"] == 0
    assert devices(stack)["cpu"]["allocated_mb"] >= used / MIB
    records = stack.ask("/memory/evictions", direct=True)["evictions"]
    assert (records[-1]["model_name"], records[-1]["action"]) == ("demo", "offload")
    again, found = answered(stack)
    assert (again, stack.worker_pid("demo"), told(stack)["used_bytes"]) == (first, pid, used)
    assert found > 100
    assert stack.ask("/memory/offloaded", direct=True)["offloaded"] == []


def devices(stack: Stack) -> dict[str, dict[str, Any]]:
    return dict(stack.ask("/memory/stats", direct=True)["per_device"])


def test_a_lost_device_takes_what_was_to_come_back_onto_it(stack: Stack) -> None:
    """Cut while the model is suspended: it is dropped, and loaded from its file when the device is back."""
    first, pid = suspended(stack)
    assert told(stack, "cut")["suspended_bytes"] == 0
    wait_until("it is dropped", lambda: stack.model("demo")["state"] == "cold")
    told(stack, "return")
    wait_until("the device is back", lambda: devices(stack)["gpu-0"]["state"] == "healthy")
    assert answered(stack)[0] == first
    assert stack.worker_pid("demo") != pid


def test_without_room_for_it_a_suspended_model_is_dropped_and_refused(stack: Stack) -> None:
    """Somebody else took the device a moment ago; when he leaves, it is loaded, and suspended as before."""
    first, _pid = suspended(stack)
    told(stack, "foreign", bytes=290 * MIB)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        answered(stack)
    assert told(stack)["suspended_bytes"] == 0
    told(stack, "heal")
    wait_until("it answers again", lambda: is_answered(stack, first))
    suspended(stack)


def is_answered(stack: Stack, wanted: str) -> bool:
    try:
        return answered(stack)[0] == wanted
    except urllib.error.HTTPError:
        return False


def test_a_suspended_worker_that_is_killed_leaves_nothing(stack: Stack) -> None:
    _first, pid = suspended(stack)
    os.kill(pid, signal.SIGKILL)
    wait_until("it is cold", lambda: stack.model("demo")["state"] == "cold")
    wait_until("its bytes are gone", lambda: told(stack)["suspended_bytes"] == 0)


def test_a_simulator_that_is_killed_takes_everything_with_it(stack: Stack) -> None:
    """A fresh one brings the device back empty, and the model is loaded from its file."""
    wait_until("it answers", lambda: is_answered(stack, answered(stack)[0]))
    first, _pid = suspended(stack)
    (simulator,) = [pid for pid in family(stack.inference.pid) if "inference.devices.simgpu" in arguments(pid)]
    servers = children_of(simulator)
    os.kill(simulator, signal.SIGKILL)
    wait_until("it is dropped", lambda: stack.model("demo")["state"] == "cold")
    wait_until("its servers are gone", lambda: not any(Path(f"/proc/{pid}").exists() for pid in servers))
    wait_until("it answers again", lambda: is_answered(stack, first))


def test_a_service_that_is_killed_leaves_nothing(stack: Stack) -> None:
    """Neither the suspended worker nor the servers in which its bytes are."""
    suspended(stack)
    everybody = family(stack.inference.pid)
    assert len(everybody) >= 3
    stack.inference.kill()
    wait_until("all are gone", lambda: not any(Path(f"/proc/{pid}").exists() for pid in everybody))
    with pytest.raises(SimulatorError):
        told(stack)


def family(pid: int) -> list[int]:
    """Everybody whom it started, and whom these did."""
    return [found for child in children_of(pid) for found in (child, *family(child))]


def arguments(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
