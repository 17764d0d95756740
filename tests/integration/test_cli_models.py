"""The CLI verbs about models and devices on a real service with two simulated GPUs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headgate.cli.main import main
from headgate.shared.state_directory import INFERENCE_TOKEN
from tests.rigs.processes import forget_own
from tests.rigs.stack import Stack

MODELS = """
models:
  demo: {path: bundled:demo, context_length: 1024, parallel: 1, min_residency: 0}
  demo-mini: {path: bundled:demo-mini, context_length: 512, parallel: 1, min_residency: 0}
  huge: {path: bundled:demo, context_length: 65536, parallel: 64}
"""
RunVerb = Callable[..., tuple[str, str]]


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    stack = Stack(tmp_path, models=MODELS, inference_env={"INFERENCE_DEVICES": "sim:2x300MiB"})
    try:
        stack.inference.start(wait_for="/readyz")
        forget_own(monkeypatch)
        monkeypatch.setenv("HEADGATE_STATE_DIR", str(stack.root / "state"))
        monkeypatch.setenv("INFERENCE_PORT", str(stack.inference.port))
        token = stack.state.read_secret(INFERENCE_TOKEN)
        assert token is not None
        monkeypatch.setenv("INFERENCE_TOKEN", token)
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.chdir(tmp_path)
        yield stack
    finally:
        stack.kill()


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]) -> RunVerb:
    """Runs a command line and returns what it wrote to stdout and stderr."""

    def run(line: str, code: int = 0) -> tuple[str, str]:
        assert main(line.split()) == code, capsys.readouterr()
        output = capsys.readouterr()
        return output.out, output.err

    return run


def used(stack: Stack) -> dict[str, int]:
    """Bytes in use on each simulated device."""
    devices = stack.ask("/devices", direct=True)["devices"]
    return {device["id"]: device["ledger"]["resident_bytes"] for device in devices if device["kind"] == "sim"}


def test_model_can_be_planned_loaded_moved_restarted_offloaded_and_unloaded(stack: Stack, verb: RunVerb) -> None:
    size = r"[\d.]+ [KM]iB"
    assert "demo fits: " in verb("plan demo")[0]
    assert re.search(r"^demo +cold +1024 .* yes +", verb("list")[0], re.MULTILINE)
    assert "no model is loaded" in verb("ps")[0]
    loaded = re.fullmatch(rf"demo: ready on (gpu-[01]), {size}", verb("load demo")[1].splitlines()[-1])
    assert loaded is not None
    first = loaded[1]
    other = {"gpu-0": "gpu-1", "gpu-1": "gpu-0"}[first]
    assert used(stack)[first] > used(stack)[other] == 0

    out, _ = verb("ps")
    pid = stack.worker_pid("demo")
    assert re.search(rf"^demo +ready +{first} +{size} +{size} +1024 +0/1 +0 +\S+ +{pid}$", out, re.MULTILINE), out
    (shown,) = json.loads(verb("ps --json")[0])
    assert shown["headgate"]["predicted_bytes"] == pytest.approx(shown["headgate"]["actual_bytes"], rel=0.01)
    out, _ = verb("show demo")
    assert re.search(rf"^memory +{size} \(predicted {size}\)$", out, re.MULTILINE)
    assert re.search(rf"^device +{first}$", out, re.MULTILINE)

    assert f"demo: ready on {other}, " in verb(f"move demo {other}")[1]
    assert used(stack)[other] > used(stack)[first] == 0
    moved = stack.worker_pid("demo")
    assert "demo: ready on " in verb("restart demo")[1]
    assert stack.worker_pid("demo") not in (pid, moved)

    assert "demo: warm on cpu, " in verb("offload demo")[1]
    assert not any(used(stack).values())
    assert re.search(r"^demo +warm ", verb("ps")[0], re.MULTILINE)
    assert "demo: ready on " in verb("load demo")[1]
    assert re.search(rf"^gpu-0 .* healthy +\w+ +{size} +{size} ", verb("devices")[0], re.MULTILINE)
    assert "demo is loaded" in verb("plan demo")[0]
    assert verb("unload demo")[1].splitlines()[-1] == "demo: cold"
    assert not any(used(stack).values())
    assert "huge does not fit" in verb("plan huge", 4)[0]
    assert "MiB" in verb("load huge", 4)[1]


def test_memory_is_shown_and_released(stack: Stack, verb: RunVerb) -> None:
    assert "demo: ready on gpu-" in verb("preload demo demo-mini")[1]
    assert "huge: " in verb("preload huge", 4)[1]
    verb("dump")
    assert "largest room on one device: " in verb("defragment")[1]
    assert "unloaded: " in verb("gc")[1]
    verb("dump")
    assert re.search(r"^models/demo/state +ready +cold +-$", verb("dump compare dump-1 dump-2")[0], re.MULTILINE)
    assert len(re.findall(r"^\S+ \S+ +demo\S* +unload +by hand +\S+ MiB ", verb("evictions")[0], re.MULTILINE)) == 2
    assert re.search(r"^\S+ \S+ +gpu-1 +low ", verb("history")[0], re.MULTILINE)
    assert re.search(r"usable memory: gpu-0 270\.0 MiB, gpu-1 270\.0 MiB, cpu [\d.]+ [GM]iB", stack.inference.log)
