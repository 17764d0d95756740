"""Overheads of workers beside buffers: learned per device, bounded, stored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headgate.shared.state_directory import StateDir
from headgate.shared.units import MIB
from inference.authority.placement.ledger import Account, Ledger
from inference.authority.placement.observed_overhead import Before
from inference.devices.device import Reading, environment_of, grants_of
from inference.estimate.overheads import GPU_OVERHEAD_BYTES, KEPT, MOST_BYTES, Overheads

CARD = Reading("gpu-0", "cuda", "H200", 1000 * MIB, 900 * MIB, 100 * MIB, driver="580.1")


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path)})


def test_overhead_is_learned_per_device_driver_and_backend(state: StateDir) -> None:
    """Three observations replace the default; the file keeps them."""
    overheads = Overheads(state)
    assert overheads.of(CARD) == GPU_OVERHEAD_BYTES
    for seen in (300, 320, 310):
        overheads.learn(CARD, seen * MIB)
    assert overheads.of(CARD) == int(320 * MIB * 1.1)
    assert Overheads(state).of(CARD) == int(320 * MIB * 1.1)
    assert overheads.of(replace(CARD, driver="590.2")) == GPU_OVERHEAD_BYTES


def test_overhead_above_the_default_is_used_at_once(state: StateDir) -> None:
    overheads = Overheads(state)
    overheads.learn(CARD, 700 * MIB)
    assert overheads.of(CARD) == int(700 * MIB * 1.1)
    for _ in range(KEPT):
        overheads.learn(CARD, 200 * MIB)
    assert overheads.of(CARD) == int(200 * MIB * 1.1)


def test_implausible_overhead_is_ignored(state: StateDir) -> None:
    overheads = Overheads(state)
    overheads.learn(CARD, MOST_BYTES + 1)
    simulated = replace(CARD, kind="sim")
    overheads.learn(simulated, 100 * MIB)
    assert (overheads.of(CARD), overheads.of(simulated)) == (GPU_OVERHEAD_BYTES, 0)


def test_devices_that_were_not_seen_for_long_are_dropped(state: StateDir) -> None:
    overheads = Overheads(state)
    for number in range(70):
        overheads.learn(replace(CARD, name=str(number)), 1000 * MIB)
    assert overheads.of(replace(CARD, name="0")) == GPU_OVERHEAD_BYTES
    assert overheads.of(replace(CARD, name="69")) > GPU_OVERHEAD_BYTES


@pytest.mark.parametrize(
    "text", ["", "[]", "nonsense", '{"version": 9}', '{"version": 1, "seen": []}', '{"version": 1, "seen": {"a": 3}}']
)
def test_damaged_file_is_ignored(text: str, state: StateDir) -> None:
    state.file("overheads.json").write_text(text)
    assert Overheads(state).of(CARD) == GPU_OVERHEAD_BYTES


def test_invalid_figures_of_the_file_are_ignored(state: StateDir) -> None:
    seen = {"H200 / 580.1 / cuda": [-5, "x", True, 10**15, 5 * MIB, 5 * MIB, 5 * MIB]}
    state.file("overheads.json").write_text(json.dumps({"version": 1, "seen": seen}))
    assert Overheads(state).of(CARD) == int(5 * MIB * 1.1)


def test_overhead_is_observed_only_without_other_changes_on_the_device() -> None:
    ledger = Ledger().open(Account("gpu-0", 1000 * MIB, 1000 * MIB))
    ledger = ledger.reserve("old", "old", {"gpu-0": 100 * MIB}).commit("old", {"gpu-0": 100 * MIB})
    ledger = ledger.reserve("own", "own", {"gpu-0": 500 * MIB})
    before = Before.of(CARD, ledger, "own")
    ledger = ledger.commit("own", {"gpu-0": 450 * MIB})
    after = replace(CARD, used_bytes=520 * MIB)
    assert before.observed(after, ledger, "own", 300 * MIB) == 120 * MIB
    assert before.observed(after, ledger.leave("old"), "own", 300 * MIB) is None
    other = ledger.reserve("new", "new", {"gpu-0": 1})
    assert before.observed(after, other, "own", 300 * MIB) is None
    assert before.observed(after, other.commit("new", {"gpu-0": 1}), "own", 300 * MIB) is None


def test_process_pinned_to_several_devices() -> None:
    """Values are joined in order; llama.cpp numbers visible devices from zero."""
    first = replace(CARD, ggml_name="CUDA0", environment={"CUDA_VISIBLE_DEVICES": "GPU-a"})
    second = replace(first, id="gpu-1", environment={"CUDA_VISIBLE_DEVICES": "GPU-b"})
    assert environment_of([first, second]) == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    assert [grant.ggml_name for grant in grants_of([first, second])] == ["CUDA0", "CUDA1"]
    assert environment_of([first]) == first.environment
    amd = [replace(CARD, environment={"ROCR_VISIBLE_DEVICES": name, "HIP_VISIBLE_DEVICES": "0"}) for name in "ab"]
    assert environment_of(amd) == {"ROCR_VISIBLE_DEVICES": "a,b", "HIP_VISIBLE_DEVICES": "0,1"}
    hidden = [replace(CARD, environment={"CUDA_VISIBLE_DEVICES": ""}) for _ in range(2)]
    assert environment_of(hidden) == {"CUDA_VISIBLE_DEVICES": ""}
    remote = [replace(CARD, id=f"gpu-{port}", rpc_endpoint=f"127.0.0.1:{port}") for port in (1, 2)]
    grants = [(grant.kind, grant.rpc_endpoint) for grant in grants_of(remote)]
    assert grants == [("gpu", "127.0.0.1:1"), ("gpu", "127.0.0.1:2")]
