"""A model that is larger than its device: experts in host memory are booked as planned and change no answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from inference.devices.simgpu.control import SOCKET_NAME, Control
from inference.workers.os_api import socket_directory
from tests.rigs.processes import wait_until
from tests.rigs.stack import Stack, chat_body
from tests.rigs.tiny_families import EXPERTS, Form, path

MIB = 2**20
FORM = Form("moe", heads_kv=8)
EXPERTS_OF_A_LAYER = 3 * EXPERTS * FORM.width * FORM.feed * 4


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """`whole` has room for its 60 MiB on the first device; the second one is smaller."""
    sizes = {"path": str(path(FORM)), "context_length": 1024, "parallel": 1, "ubatch": 128, "min_residency": 0}
    models = {
        "whole": {**sizes, "gpu_index": 0},
        "apart": {**sizes, "gpu_index": 1, "experts": "auto"},
        "plain": {**sizes, "gpu_index": 1},
    }
    stack = Stack(
        tmp_path_factory.mktemp("experts"),
        models=json.dumps({"models": models}),
        inference_env={"INFERENCE_DEVICES": "sim:100MiB,40MiB"},
    )
    try:
        stack.inference.start(wait_for="/readyz")
        yield stack
    finally:
        stack.kill()


def planned(stack: Stack, model: str, **settings: object) -> dict[str, Any]:
    found: dict[str, Any] = stack.ask("/memory/plan", {"model": model, **settings}, direct=True)
    return found


def answer(stack: Stack, model: str) -> str:
    body = chat_body("the water mill and a gate", model, max_tokens=24, temperature=0)
    return str(stack.ask("/v1/chat/completions", body, direct=True)["choices"][0]["message"]["content"])


def speed(stack: Stack, model: str) -> float:
    return float(planned(stack, model)["expected"]["tokens_per_second"] or 0.0)


def used(stack: Stack) -> dict[str, int]:
    with Control(socket_directory(stack.state) / SOCKET_NAME) as rig:
        return {name: item["used_bytes"] for name, item in rig.send("status").items()}


def test_experts_that_do_not_fit_are_in_host_memory_and_answers_are_the_same(stack: Stack) -> None:
    """The device counts the planned bytes within 256 KiB; the plan names the change and its speed."""
    plan = planned(stack, "apart")
    count = plan["changes"]["experts"]
    assert plan["result"] == "FREE"
    assert 1 <= count < FORM.layers
    parts = plan["estimate"]["devices"]
    assert parts["cpu"]["weights_bytes"] >= count * EXPERTS_OF_A_LAYER
    assert planned(stack, "plain", experts=count - 1)["result"] == "CANT_ACCOMMODATE"
    assert answer(stack, "apart") == answer(stack, "whole")
    on_device = parts["gpu-1"]
    predicted = on_device["weights_bytes"] + on_device["kv_bytes"] + on_device["compute_bytes"]
    assert used(stack)["gpu-1"] == pytest.approx(predicted, abs=MIB / 4)
    status = stack.model("apart")
    assert (status["experts"], status["reduced"], status["devices"]) == (count, ["experts"], ["gpu-1"])
    wait_until("both have a measured speed", lambda: all(speed(stack, name) for name in ("apart", "whole")))
    expected, whole = planned(stack, "apart")["expected"], planned(stack, "whole")["expected"]
    assert sum(expected["read_bytes"].values()) == whole["read_bytes"]["gpu-0"]
    assert expected["read_bytes"]["cpu"] == count * EXPERTS_OF_A_LAYER * 2 // EXPERTS


def test_model_without_automatic_experts_is_refused_with_a_suggestion(stack: Stack) -> None:
    refused = planned(stack, "plain")
    assert refused["result"] == "CANT_ACCOMMODATE"
    assert refused["changes"] == {}
    assert refused["expected"] is None
    assert planned(stack, "plain", **refused["fix"])["result"] in ("FREE", "FULL")
    assert planned(stack, "plain", experts="host")["result"] in ("FREE", "FULL")
