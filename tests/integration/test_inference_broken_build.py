"""A build of llama.cpp that does not compute on this CPU: refused at the start, detected when a worker ends."""

from __future__ import annotations

import contextlib
import json
import sys
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from headgate.build import Build
from headgate.shared.errors import Exit
from inference.devices.accelerator_record import NAME as ACCELERATORS
from inference.devices.simgpu.rpc_server import package
from tests.rigs.broken_llama import BrokenLlama
from tests.rigs.processes import http_status, wait_until
from tests.rigs.stack import Stack

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="preloads a library")

QUESTION = {"model": "demo", "messages": [{"role": "user", "content": "What is your name?"}], "max_tokens": 8}
ROUTES = 'routes: {"*": {chain: ["local/*"]}}'
WORKERS = "inference.worker"


@pytest.fixture
def broken(tmp_path: Path) -> BrokenLlama:
    return BrokenLlama(tmp_path)


@pytest.fixture
def stack(tmp_path: Path, broken: BrokenLlama) -> Iterator[Stack]:
    env = {**broken.env, "INFERENCE_FORCE_CPU_MODE": "true"}
    stack = Stack(tmp_path, gateway=ROUTES, inference_env=env)
    yield stack
    stack.kill()


def _state_with_doubted_build(stack: Stack) -> Path:
    """The state of a service that ended because its build does not compute; the next one checks it."""
    engine = package()
    assert engine is not None
    record = stack.state.root / "build.json"
    record.write_text(json.dumps({"failed": asdict(Build.at(engine))}))
    return record


def _refusal(stack: Stack, *, direct: bool = False) -> dict[str, Any]:
    """The error of a failing request."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        stack.ask("/v1/chat/completions", QUESTION, direct=direct, seconds=60.0)
    return {"status": caught.value.code, **json.load(caught.value)["error"]}


@pytest.mark.parametrize("how", ["sigill", "zero"])
def test_service_with_a_broken_build_ends_with_70_before_it_is_ready(
    stack: Stack, broken: BrokenLlama, how: str
) -> None:
    _state_with_doubted_build(stack)
    broken.breaks(how)
    with contextlib.suppress(AssertionError):  # it may end before it answers
        stack.inference.start()
        assert http_status(stack.inference.url + "/readyz") in (503, None)
    assert stack.inference.wait() == Exit.RESTART_OUTSIDE
    (line,) = [line for line in stack.inference.log.splitlines() if "does not compute" in line]
    assert "`make clean`, then `make serve`" in line
    assert "the inference service listens on" not in stack.inference.log


def test_suspected_build_that_computes_is_recorded_and_used(stack: Stack) -> None:
    record = _state_with_doubted_build(stack)
    stack.start()
    assert "passed" in json.loads(record.read_text())
    assert stack.ask("/v1/chat/completions", QUESTION)["choices"]


@pytest.mark.parametrize("loaded", [False, True], ids=["while it loads", "while it answers"])
def test_service_whose_build_stops_computing_ends_with_70(stack: Stack, broken: BrokenLlama, loaded: bool) -> None:
    """Requests get an error that says so, no breaker of a model opens, and no accelerator counts as unreachable."""
    stack.start()
    if loaded:
        stack.ask("/models/demo/load", {}, direct=True)
    broken.breaks("sigill")
    with ThreadPoolExecutor(8) as pool:
        errors = list(pool.map(lambda _: _refusal(stack), range(8)))
    assert {error["status"] for error in errors} == {503}
    assert any("llama.cpp does not compute on this machine's CPU" in error["message"] for error in errors)
    assert stack.inference.wait() == Exit.RESTART_OUTSIDE
    log = stack.inference.log
    assert "signal SIGILL (broken build)" in log
    assert log.count("the service ends and must be restarted: llama.cpp does not compute on this CPU") == 1
    assert not (stack.state.root / ACCELERATORS).exists()
    pairs = [breaker for breaker in stack.breakers() if breaker["model"] is not None]
    assert [breaker["state"] for breaker in pairs if breaker["state"] != "closed"] == []


def _causes(stack: Stack) -> list[str]:
    """The causes of the recorded crashes of the model, newest first."""
    return [crash["cause"] for crash in stack.ask("/models/demo/crashes", direct=True)["crashes"]]


def test_model_that_crashes_at_its_first_step_fails_alone(stack: Stack, broken: BrokenLlama) -> None:
    """The build computes, so the service continues, and the next exit is an ordinary one."""
    stack.start()
    broken.breaks("sigsegv", only=WORKERS)
    causes: list[str] = []
    for cause in ("broken_build", "assert"):
        assert _refusal(stack, direct=True)["code"] == "model_failed"
        causes.insert(0, cause)
        wait_until("the crash is recorded", lambda: _causes(stack) == causes)
        wait_until("the backoff ended", lambda: stack.model("demo")["state"] == "cold")
    assert "the check of llama.cpp succeeded; the crash is attributed to the model" in stack.inference.log
    broken.computes()
    assert stack.ask("/v1/chat/completions", QUESTION, direct=True)["choices"]


def test_requests_during_the_check_are_answered_and_end_with_the_service(stack: Stack, broken: BrokenLlama) -> None:
    """The port answers during the check; a gateway that listens to events does not delay the exit."""
    _state_with_doubted_build(stack)
    broken.breaks("late")
    stack.front.start()
    stack.inference.start()
    assert [model["id"] for model in stack.ask("/v1/models", direct=True)["data"]] == ["demo", "demo-mini"]
    assert http_status(stack.inference.url + "/readyz") == 503
    assert _refusal(stack, direct=True)["code"] == "shutting_down"
    assert stack.inference.wait(10.0) == Exit.RESTART_OUTSIDE
    assert "Traceback" not in stack.inference.log
