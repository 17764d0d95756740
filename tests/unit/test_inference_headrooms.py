"""The file of what was learned when memory ran out: kept, read back, forgotten, and of no harm when damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headgate.shared.state import StateDir
from inference import settings
from inference.devices.device import Reading
from inference.estimate.estimator import Estimate
from inference.estimate.header_formula import Parts
from inference.estimate.headroom import ENOUGH_GOOD, HALF_LIFE_SECONDS
from inference.estimate.headrooms import Headrooms
from inference.settings import ModelSpec

MIB = 2**20
GPU = Reading("gpu-0", "cuda", "H200", 1000 * MIB, 900 * MIB, 100 * MIB, driver="580.1")
NEED = 160 * MIB
PLAIN = Estimate({"gpu-0": Parts(NEED, 0, 0)}, {"cpu": MIB}, "llama.cpp", "", 4096)


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")})


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    (tmp_path / "models.yaml").write_text(json.dumps({"models": {"a": {"path": str(tmp_path / "x.gguf")}}}))
    return settings.load(tmp_path, {}, {}).models["a"]


def test_it_is_kept_per_file_parameters_and_device(state: StateDir, spec: ModelSpec) -> None:
    """What was learned of one is not asked of another; a restart knows it still."""
    rooms = Headrooms(state, clock=lambda: 1.0)
    assert rooms.short(spec, GPU, NEED, computing=True) == 10 * MIB
    again = Headrooms(state, clock=lambda: 1.0)
    assert again.of(spec, GPU).compute_bytes == 10 * MIB
    assert again.of(replace(spec, ubatch=64), GPU).is_empty
    assert again.of(spec, replace(GPU, id="gpu-1")).is_empty
    assert again.of(spec, replace(GPU, driver="590")).is_empty


def test_an_estimate_has_it_on_top_and_says_how_much_it_is(state: StateDir, spec: ModelSpec) -> None:
    """Reserved like everything else; what refused loads taught only as far as the device can give it."""
    rooms = Headrooms(state, clock=lambda: 1.0)
    assert rooms.added(spec, [GPU], PLAIN, {"gpu-0": 900 * MIB}) is PLAIN
    rooms.short(spec, GPU, NEED, computing=False)
    found = rooms.added(spec, [GPU], PLAIN, {"gpu-0": 900 * MIB})
    assert found.need == {"gpu-0": NEED + 10 * MIB, "cpu": MIB}
    assert found.to_json()["devices"]["gpu-0"]["headroom_bytes"] == 10 * MIB
    assert rooms.added(spec, [GPU], PLAIN, {"gpu-0": NEED + MIB}).need["gpu-0"] == NEED + MIB
    assert rooms.added(spec, [GPU], PLAIN, {}) is PLAIN


def test_a_configured_overhead_replaces_what_was_learned(state: StateDir, spec: ModelSpec) -> None:
    """The operator's word counts, and is the way out when what was learned is wrong."""
    rooms = Headrooms(state, clock=lambda: 1.0)
    rooms.short(spec, GPU, NEED, computing=True)
    told = replace(spec, memory_overhead=8 * MIB)
    assert rooms.added(told, [GPU], PLAIN, {"gpu-0": 900 * MIB}) is PLAIN
    assert rooms.short(told, GPU, NEED, computing=True) == 0
    assert rooms.of(spec, GPU).compute_bytes == 10 * MIB


def test_good_ends_and_time_take_it_back(state: StateDir, spec: ModelSpec) -> None:
    """And whoever counted with it is told when it changed."""
    now = [0.0]
    rooms = Headrooms(state, clock=lambda: now[0])
    rooms.short(spec, GPU, NEED, computing=True)
    assert [rooms.ended_well(spec, [GPU]) for _ in range(ENOUGH_GOOD)] == [False] * (ENOUGH_GOOD - 1) + [True]
    assert rooms.of(spec, GPU).compute_bytes == 5 * MIB
    now[0] = HALF_LIFE_SECONDS
    assert rooms.of(spec, GPU).compute_bytes == 5 * MIB // 2
    now[0] = 100 * HALF_LIFE_SECONDS
    assert rooms.ended_well(spec, [GPU])
    assert rooms.of(spec, GPU).is_empty
    assert not rooms.ended_well(spec, [GPU])
    assert json.loads((state.root / "headroom.json").read_bytes())["learned"] == {}


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"[]",
        b'{"version": 0, "learned": {}}',
        b'{"version": 1, "learned": {"k": {"load_bytes": -1, "compute_bytes": 0, "good": 0, "at": 0}}}',
        b'{"version": 1, "learned": {"k": {"load_bytes": 1, "compute_bytes": 1e999, "good": 0, "at": 0}}}',
        b'{"version": 1, "learned": 5}',
    ],
    ids=["empty", "a list", "another version", "negative", "infinite", "a number"],
)
def test_a_damaged_file_counts_as_nothing(state: StateDir, spec: ModelSpec, said: bytes) -> None:
    (state.root / "headroom.json").write_bytes(said)
    rooms = Headrooms(state)
    assert rooms.of(spec, GPU).is_empty
    rooms.short(spec, GPU, NEED, computing=True)
    assert Headrooms(state).of(spec, GPU).compute_bytes == 10 * MIB
