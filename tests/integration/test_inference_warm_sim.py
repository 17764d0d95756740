"""The warm pool on simulated GPUs: nothing stays on the device, and models are restored on a device with room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.devices.simgpu.control import SOCKET_NAME, Control
from inference.workers.os_api import socket_directory
from tests.rigs.stack import Stack, chat_body, until

MODELS = """
models:
  demo: {path: bundled:demo, context_length: 2048, parallel: 2, min_residency: 0}
  demo-mini: {path: bundled:demo-mini, context_length: 1024, parallel: 1, dedicated: true}
"""
STORY = "Once upon a time there was a little girl. She liked to play in the garden with her dog. " * 8


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    environment = {"INFERENCE_DEVICES": "sim:2x300MiB", "INFERENCE_WARM_CHECKPOINT": "off"}
    started = Stack(tmp_path, models=MODELS, inference_env=environment)
    started.inference.start(wait_for="/readyz")
    yield started
    started.kill()


def post(stack: Stack, path: str, body: Any = None) -> Any:
    return stack.ask(path, {} if body is None else body, direct=True)


def used_bytes(stack: Stack, device: str) -> int:
    """The count of the device."""
    with Control(socket_directory(stack.state) / SOCKET_NAME) as rig:
        return int(rig.send("status")[device]["used_bytes"])


async def test_warm_model_uses_no_device_memory_and_is_restored_on_a_device_with_room(stack: Stack) -> None:
    """The answer is the same with a cached prompt."""
    body = chat_body(STORY, max_tokens=16)
    first = post(stack, "/v1/chat/completions", body)
    (home,) = stack.model("demo")["devices"]
    assert used_bytes(stack, home) > 0
    post(stack, "/models/demo/offload")
    await until("the device is empty", lambda: used_bytes(stack, home) == 0)
    (kept,) = stack.ask("/memory/offloaded", direct=True)["offloaded"]
    assert (kept["mechanism"], kept["original_device"]) == ("resident", home)
    assert kept["tokens"] > 100
    post(stack, "/models/demo-mini/load")  # dedicated: it takes a whole device
    (taken,) = stack.model("demo-mini")["devices"]
    again = post(stack, "/v1/chat/completions", body)
    (now,) = stack.model("demo")["devices"]
    assert now != taken
    assert again["choices"][0]["message"]["content"] == first["choices"][0]["message"]["content"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert stack.ask("/memory/offloaded", direct=True)["offloaded"] == []
