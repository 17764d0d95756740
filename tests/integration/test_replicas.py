"""Two replicas of one model on two simulated devices: both are used, a crash ends one, a smaller number drains one."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inference.devices.simgpu.control import SOCKET_NAME, Control
from inference.workers.os_api import socket_directory
from tests.rigs.processes import wait_until
from tests.rigs.stack import LOCAL_ROUTES, Stack, chat_body

ENTRY = {"path": "bundled:demo", "context_length": 512, "parallel": 2, "warm": False}
PACE_SECONDS = 0.02


def models(replicas: int | str) -> str:
    return json.dumps({"models": {"demo": {**ENTRY, "replicas": replicas}}})


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    routes = LOCAL_ROUTES.replace("[local/demo, local/demo-mini]", "[local/demo]")
    root = tmp_path_factory.mktemp("replicas")
    stack = Stack(root, models(2), routes, inference_env={"INFERENCE_DEVICES": "sim:2x600MiB"}).start()
    with Control(socket_directory(stack.state) / SOCKET_NAME) as rig:
        rig.send("pace", seconds=PACE_SECONDS)
    yield stack
    stack.kill()


@pytest.fixture
def stack(service: Stack) -> Stack:
    """Two loaded replicas."""
    service.write_models(models(2))
    service.inference.signal(signal.SIGHUP)
    wait_until("both are configured", lambda: len(replicas(service)) == 2)
    service.ask("/models/demo/load", {}, direct=True)
    return service


def replicas(stack: Stack) -> dict[str, dict[str, Any]]:
    return {item["id"]: item for item in stack.model("demo")["replicas"]}


def ask(stack: Stack, number: int, tokens: int = 40) -> str:
    answer = stack.ask("/v1/chat/completions", chat_body(f"{number} Tell me a story.", max_tokens=tokens))
    return str(answer["choices"][0]["finish_reason"])


def test_replicas_serve_together_and_a_crash_takes_down_one(stack: Stack) -> None:
    """Its requests without output go to the other replica, whose requests continue. It is loaded again."""
    assert [item["state"] for item in replicas(stack).values()] == ["ready", "ready"]
    assert {name for item in replicas(stack).values() for name in item["devices"]} == {"gpu-0", "gpu-1"}
    (listed,) = stack.ask("/v1/models", direct=True)["data"]
    assert (listed["id"], listed["headgate"]["parallel"]) == ("demo", 4)
    assert [item["id"] for item in stack.ask("/v1/models")["data"] if "demo" in item["id"]] == ["demo"]
    held = stack.ask("/memory/models", direct=True)["models"]
    assert [item["model_name"] for item in held] == ["demo", "demo@2"]
    pids = {name: item["pid"] for name, item in replicas(stack).items()}
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, stack, number) for number in range(4)]
        wait_until("both compute", lambda: [item["in_flight"] for item in replicas(stack).values()] == [2, 2])
        os.kill(pids["demo"], signal.SIGKILL)
        assert {answer.result(30) for answer in answers} <= {"length", "stop"}
    after = replicas(stack)
    assert after["demo@2"]["pid"] == pids["demo@2"], "the other worker continues"
    ask(stack, 9, 2)
    wait_until("the crashed replica is back", lambda: replicas(stack)["demo"]["state"] in ("ready", "busy"))


def device_of(stack: Stack, messages: list[dict[str, str]]) -> tuple[str, dict[str, str]]:
    """The device that answered, and the answer."""
    body = json.dumps({"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 8}).encode()
    headers = {"Authorization": f"Bearer {stack.key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{stack.base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.headers["x-headgate-device"]), json.load(answer)["choices"][0]["message"]


def test_turns_of_a_conversation_go_to_the_same_replica(stack: Stack) -> None:
    conversations: dict[str, list[dict[str, str]]] = {
        name: [{"role": "user", "content": f"Hello, I am {name}. Tell me a story."}]
        for name in ("Ann", "Bob", "Eve", "Jo")
    }
    devices: dict[str, set[str]] = {name: set() for name in conversations}

    def turn(name: str) -> None:
        device, message = device_of(stack, conversations[name])
        devices[name].add(device)
        conversations[name] += [message, {"role": "user", "content": "Go on."}]

    for _ in range(3):
        with ThreadPoolExecutor(len(conversations)) as pool:
            list(pool.map(turn, conversations))
    assert [len(found) for found in devices.values()] == [1, 1, 1, 1]
    assert set.union(*devices.values()) == {"gpu-0", "gpu-1"}


def test_reload_with_one_replica_drains_the_other(stack: Stack) -> None:
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask, stack, number) for number in (20, 21)]
        wait_until("both compute", lambda: [item["in_flight"] for item in replicas(stack).values()] == [1, 1])
        stack.write_models(models(1))
        stack.inference.signal(signal.SIGHUP)
        wait_until("one drains", lambda: replicas(stack).get("demo@2", {}).get("state") == "draining")
        assert {answer.result(30) for answer in answers} <= {"length", "stop"}
    wait_until("it is gone", lambda: not replicas(stack))
    assert stack.model("demo")["state"] in ("ready", "busy")


def test_commands_act_on_all_replicas_or_on_one_by_its_id(stack: Stack) -> None:
    before = {name: item["pid"] for name, item in replicas(stack).items()}
    status = stack.ask("/models/demo@2/unload", {}, direct=True)
    assert status["headgate"]["state"] == "cold"
    assert stack.model("demo")["state"] == "ready"
    stack.ask("/models/demo@2/load", {}, direct=True)
    stack.ask("/models/demo@1/restart", {}, direct=True)
    after = {name: item["pid"] for name, item in replicas(stack).items()}
    assert [before[name] != after[name] for name in ("demo", "demo@2")] == [True, True]
    stack.ask("/models/demo/unload", {}, direct=True)
    assert {item["state"] for item in replicas(stack).values()} == {"cold"}
