"""A whole service on simulated devices: models live there, the numbers are true, and what is lost is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.devices.simgpu.control import SOCKET_NAME, Control
from inference.osapi import socket_directory
from tests.rigs.processes import wait_until
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


def state_of(stack: Stack, device: str) -> str:
    devices = stack.ask("/devices", direct=True)["devices"]
    return str(next(item["state"] for item in devices if item["id"] == device))
