"""A whole service on simulated devices: loads, correct numbers, and lost devices."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.devices.simgpu.control import SOCKET_NAME, Control
from inference.workers.os_api import socket_directory
from tests.rigs.processes import command_of, descendants_of, wait_until
from tests.rigs.stack import Stack, chat_body


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, inference_env={"INFERENCE_DEVICES": "sim:2x600MiB"}).start()
    yield stack
    stack.kill()


def control(stack: Stack) -> Control:
    return Control(socket_directory(stack.state) / SOCKET_NAME)


def test_models_run_on_simulated_devices_until_they_are_cut(stack: Stack) -> None:
    """The device counts the planned bytes; after it is cut, the other one runs the model."""
    shown = {device["id"]: device for device in stack.ask("/devices", direct=True)["devices"]}
    assert [(name, device["kind"]) for name, device in shown.items()] == [
        ("gpu-0", "sim"),
        ("gpu-1", "sim"),
        ("cpu", "cpu"),
    ]
    assert shown["gpu-0"]["total_bytes"] == 600 * 2**20
    planned = stack.ask("/memory/plan", {"model": "demo"}, direct=True)["need_bytes"]
    assert stack.ask("/v1/chat/completions", chat_body("hello", max_tokens=4))["choices"]
    model = stack.model("demo")
    (device,) = model["devices"]
    other = {"gpu-0": "gpu-1", "gpu-1": "gpu-0"}[device]
    with control(stack) as rig:
        there = rig.send("status")
        assert there[device]["allocations"] > 0
        assert there[other]["allocations"] == 0
        assert there[device]["used_bytes"] == planned[device]
        rig.send("cut", device)
        assert rig.send("status")[device]["used_bytes"] == 0
        # An idle worker does not notice; the next request does, and is answered elsewhere.
        assert stack.ask("/v1/chat/completions", chat_body("hello again", max_tokens=4))["choices"]
        wait_until("the loss is shown", lambda: state_of(stack, device) == "lost")
        crashes = stack.ask("/models/demo/crashes", direct=True)["crashes"]
        assert crashes[0]["cause"] == "device_lost"
        assert rig.send("status")[other]["allocations"] > 0
        rig.send("return", device)
        wait_until("the device is healthy", lambda: state_of(stack, device) == "healthy")


def test_requests_fail_fast_without_devices_and_succeed_when_one_returns(stack: Stack) -> None:
    """The error has the device, the reason and the time of the next try; nothing runs on the CPU."""
    stack.ask("/models/demo/load", {}, direct=True)
    with control(stack) as rig:
        rig.send("cut")
        ask = chat_body("hello", max_tokens=4)
        assert refusal(stack, "/v1/chat/completions", ask, direct=True)[0] == 503
        wait_until("all are lost", lambda: {state_of(stack, name) for name in ("gpu-0", "gpu-1")} == {"lost"})
        began = time.monotonic()
        with pytest.raises(urllib.error.HTTPError) as failed:
            stack.ask("/v1/chat/completions", ask, direct=True)
        with failed.value as answer:
            error = json.load(answer)["error"]
            assert (answer.code, error["code"]) == (503, "device_lost")
            assert 1 <= int(answer.headers["retry-after"]) <= 10
        assert error["message"] == (
            "the model 'demo' cannot be loaded: gpu-0 is lost (its connections were cut), "
            "gpu-1 is lost (its connections were cut)"
        )
        assert time.monotonic() - began < 5
        wait_until("the gateway refuses", lambda: "gpu-0 is lost" in refusal(stack, "/v1/chat/completions", ask)[1])
        status, health = refused_health(stack)
        assert (status, health["message"]) == (503, "gpu-0 is lost; gpu-1 is lost")
        rig.send("return", "gpu-1")
        wait_until("one device is healthy", lambda: state_of(stack, "gpu-1") == "healthy")
        stack.ask("/models/demo/load", {}, direct=True)
        assert stack.model("demo")["devices"] == ["gpu-1"]
        assert stack.ask("/devices/gpu-0/recover", {}, direct=True)["device"]["state"] == "lost"
        rig.send("return", "gpu-0")
        assert stack.ask("/devices/gpu-0/recover", {}, direct=True)["device"]["state"] == "healthy"
        assert rig.send("status")["gpu-1"]["allocations"] > 0


def refused_health(stack: Stack) -> tuple[int, dict[str, Any]]:
    """Status and body of /health while it is not ok."""
    with pytest.raises(urllib.error.HTTPError) as failed:
        stack.ask("/health", direct=True)
    with failed.value as answer:
        return answer.code, json.load(answer)


def state_of(stack: Stack, device: str) -> str:
    devices = stack.ask("/devices", direct=True)["devices"]
    return str(next(item["state"] for item in devices if item["id"] == device))


def test_load_whose_allocation_fails_is_reported_and_can_be_repeated(stack: Stack) -> None:
    """The memory was not free: the load fails with the cause, its memory is released, and the next load succeeds."""
    with control(stack) as rig:
        rig.send("refuse", count=1)
        status, message = refusal(stack, "/models/demo/load", {}, direct=True)
        assert status == 503
        assert "unable to allocate" in message
        assert sum(device["used_bytes"] for device in rig.send("status").values()) == 0
        crashes = stack.ask("/models/demo/crashes", direct=True)["crashes"]
        assert crashes[0]["cause"] == "oom_load"
        wait_until("a load is possible", lambda: stack.model("demo")["state"] == "cold")
        stack.ask("/models/demo/load", {}, direct=True)
        models = stack.ask("/memory/models", direct=True)["models"]
        estimate = next(model["estimate"] for model in models if model["model_name"] == "demo")
        assert sum(part["headroom_bytes"] for part in estimate["devices"].values()) > 0, "head-room was learned"
        assert sum(device["allocations"] for device in rig.send("status").values()) > 0


def test_end_of_the_simulator_loses_its_devices_and_not_the_service(stack: Stack) -> None:
    """Requests fail fast with the reason, and the service keeps running."""
    assert stack.ask("/v1/chat/completions", chat_body("hello", max_tokens=4))["choices"]
    os.kill(simulator_pid(stack), signal.SIGKILL)
    wait_until("the loss is shown", lambda: state_of(stack, "gpu-0") == state_of(stack, "gpu-1") == "lost")
    for _ in range(2):  # the first request finds the dying worker, the second no device
        assert refusal(stack, "/v1/chat/completions", chat_body("hello", max_tokens=4))[0] == 503
    assert stack.ask("/livez", direct=True)
    assert stack.model("demo")["state"] not in ("ready", "busy")


def refusal(stack: Stack, path: str, body: Any, *, direct: bool = False) -> tuple[int, str]:
    """Status and message of a failing request."""
    with pytest.raises(urllib.error.HTTPError) as failed:
        stack.ask(path, body, direct=direct)
    with failed.value as answer:
        return answer.code, json.load(answer)["error"]["message"]


def simulator_pid(stack: Stack) -> int:
    for pid in descendants_of(stack.inference.pid):
        if "inference.devices.simgpu " in command_of(pid):
            return pid
    raise AssertionError("no simulator runs")
