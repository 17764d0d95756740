"""Pools of a model grow on a simulated GPU while it computes: they are booked to it, and its idle neighbor stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.devices.simgpu.control import SOCKET_NAME, Control
from inference.workers.os_api import socket_directory
from tests.rigs.demo_pair import demo_pair
from tests.rigs.processes import wait_until
from tests.rigs.stack import Stack, chat_body

MIB = 2**20
CHECKS_SECONDS = 1.0


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with demo_pair(tmp_path) as started:
        yield started


def chat(stack: Stack, model: str, tokens: int) -> Any:
    return stack.ask("/v1/chat/completions", chat_body("hello", model, max_tokens=tokens), direct=True)["choices"]


def device(stack: Stack) -> Any:
    return stack.ask("/memory/stats", direct=True)["per_device"]["gpu-0"]


def growth(stack: Stack, model: str) -> Any:
    models = stack.ask("/memory/models", direct=True)["models"]
    return next(one["growth"] for one in models if one["model_name"] == model)


@pytest.mark.parametrize(
    ("tells", "evidence"),
    [(True, "the driver reports it for its process"), (False, "no other model was active on the device meanwhile")],
    ids=["figures", "no figures"],
)
def test_growth_under_load_is_booked_to_its_model_and_the_idle_neighbor_stays(
    stack: Stack, tells: bool, evidence: str
) -> None:
    with Control(socket_directory(stack.state) / SOCKET_NAME) as rig:
        rig.send("foreign", "gpu-0", bytes=250 * MIB)
        wait_until("the use is read", lambda: device(stack)["foreign_mb"] == 250)
        assert chat(stack, "demo-mini", 4)
        assert chat(stack, "demo", 1)
        if tells:
            rig.send("tell", "gpu-0")
        time.sleep(CHECKS_SECONDS)
        rig.send("pools", "gpu-0", bytes=48 * MIB)
        assert chat(stack, "demo", 20)
        booked = {"gpu-0": {"mb": pytest.approx(48, abs=0.5), "evidence": evidence}}
        wait_until("the growth is booked", lambda: growth(stack, "demo") == booked)
        time.sleep(CHECKS_SECONDS)
        assert growth(stack, "demo") == booked
        assert device(stack)["foreign_mb"] == pytest.approx(250, abs=4)
        assert not stack.ask("/memory/evictions", direct=True)["evictions"], stack.inference.log
