"""A whole service on simulated devices: models live there, the numbers are true, and what is lost is told."""

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
from tests.rigs.processes import children_of, command_of, wait_until
from tests.rigs.stack import Stack, chat_body


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, inference_env={"INFERENCE_DEVICES": "sim:2x600MiB"}).start()
    yield stack
    stack.kill()


def control(stack: Stack) -> Control:
    return Control(socket_directory(stack.state) / SOCKET_NAME)


def test_models_live_on_simulated_devices_until_they_are_cut(stack: Stack) -> None:
    """Predicted bytes are what the device counts; a cut device loses its models, and the other one takes them."""
    shown = {device["id"]: device for device in stack.ask("/devices", direct=True)["devices"]}
    assert [(name, device["kind"]) for name, device in shown.items()] == [
        ("gpu-0", "sim"),
        ("gpu-1", "sim"),
        ("cpu", "cpu"),
    ]
    assert shown["gpu-0"]["total_bytes"] == 600 * 2**20
    assert stack.ask("/v1/chat/completions", chat_body("hello", max_tokens=4))["choices"]
    model = stack.model("demo")
    (device,) = model["devices"]
    other = {"gpu-0": "gpu-1", "gpu-1": "gpu-0"}[device]
    with control(stack) as rig:
        there = rig.tell("status")
        assert there[device]["allocations"] > 0
        assert there[other]["allocations"] == 0
        rig.tell("cut", device)
        assert rig.tell("status")[device]["used_bytes"] == 0
        # a worker that computes nothing does not notice; the next request finds out, and is answered elsewhere
        assert stack.ask("/v1/chat/completions", chat_body("hello again", max_tokens=4))["choices"]
        wait_until("the service has seen it", lambda: state_of(stack, device) == "lost")
        crashes = stack.ask("/models/demo/crashes", direct=True)["crashes"]
        assert crashes[0]["cause"] == "device_lost"
        assert rig.tell("status")[other]["allocations"] > 0
        rig.tell("return", device)
        wait_until("it is back by itself", lambda: state_of(stack, device) == "healthy")


def test_with_every_device_gone_requests_fail_at_once_and_all_is_well_when_one_is_back(stack: Stack) -> None:
    """What is told is true: which device, why, and when it is tried again; nothing is ever computed on the CPU."""
    stack.ask("/models/demo/load", {}, direct=True)
    with control(stack) as rig:
        rig.tell("cut")
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
            "the model 'demo' cannot be loaded: gpu-0 is lost (it was cut), gpu-1 is lost (it was cut)"
        )
        assert time.monotonic() - began < 5
        wait_until("the gateway knows", lambda: "gpu-0 is lost" in refusal(stack, "/v1/chat/completions", ask)[1])
        status, health = refused_health(stack)
        assert (status, health["message"]) == (503, "gpu-0 is lost; gpu-1 is lost")
        rig.tell("return", "gpu-1")
        wait_until("one is back", lambda: state_of(stack, "gpu-1") == "healthy")
        stack.ask("/models/demo/load", {}, direct=True)
        assert stack.model("demo")["devices"] == ["gpu-1"]
        assert stack.ask("/devices/gpu-0/recover", {}, direct=True)["device"]["state"] == "lost"
        rig.tell("return", "gpu-0")
        assert stack.ask("/devices/gpu-0/recover", {}, direct=True)["device"]["state"] == "healthy"
        assert rig.tell("status")["gpu-1"]["allocations"] > 0


def refused_health(stack: Stack) -> tuple[int, dict[str, Any]]:
    """Status and body of /health while it is not well."""
    with pytest.raises(urllib.error.HTTPError) as failed:
        stack.ask("/health", direct=True)
    with failed.value as answer:
        return answer.code, json.load(answer)


def state_of(stack: Stack, device: str) -> str:
    devices = stack.ask("/devices", direct=True)["devices"]
    return str(next(item["state"] for item in devices if item["id"] == device))


def test_an_allocation_that_fails_although_it_was_planned_is_told_and_can_be_tried_again(stack: Stack) -> None:
    """Memory that only looked free: the load fails cleanly with its cause, holds nothing, and the next one succeeds."""
    with control(stack) as rig:
        rig.tell("refuse", count=1)
        status, message = refusal(stack, "/models/demo/load", {}, direct=True)
        assert status == 503
        assert "unable to allocate" in message
        assert sum(device["used_bytes"] for device in rig.tell("status").values()) == 0
        crashes = stack.ask("/models/demo/crashes", direct=True)["crashes"]
        assert crashes[0]["cause"] == "oom_load"
        wait_until("it may be tried again", lambda: stack.model("demo")["state"] == "cold")
        stack.ask("/models/demo/load", {}, direct=True)
        models = stack.ask("/memory/models", direct=True)["models"]
        estimate = next(model["estimate"] for model in models if model["model_name"] == "demo")
        assert sum(part["headroom_bytes"] for part in estimate["devices"].values()) > 0, "the ledger has learned"
        assert sum(device["allocations"] for device in rig.tell("status").values()) > 0


def test_the_end_of_the_simulator_is_the_loss_of_its_devices_and_not_of_the_service(stack: Stack) -> None:
    """A request is answered with what happened, quickly; the service lives, says what is lost, and never hangs."""
    assert stack.ask("/v1/chat/completions", chat_body("hello", max_tokens=4))["choices"]
    os.kill(simulator_pid(stack), signal.SIGKILL)
    wait_until("the service has seen it", lambda: state_of(stack, "gpu-0") == state_of(stack, "gpu-1") == "lost")
    for _ in range(2):  # the first finds the worker dying, the second no device at all
        assert refusal(stack, "/v1/chat/completions", chat_body("hello", max_tokens=4))[0] == 503
    assert stack.ask("/livez", direct=True)
    assert stack.model("demo")["state"] not in ("ready", "busy")


def refusal(stack: Stack, path: str, body: Any, *, direct: bool = False) -> tuple[int, str]:
    """Status and message of a request that fails."""
    with pytest.raises(urllib.error.HTTPError) as failed:
        stack.ask(path, body, direct=direct)
    with failed.value as answer:
        return answer.code, json.load(answer)["error"]["message"]


def simulator_pid(stack: Stack) -> int:
    for pid in children_of(stack.inference.pid):
        if "inference.devices.simgpu " in command_of(pid):
            return pid
    raise AssertionError("no simulator runs")
