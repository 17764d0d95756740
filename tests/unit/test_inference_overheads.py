"""Overheads of workers beside buffers, learned per device, and headrooms, learned per model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.shared.state_directory import StateDir
from headgate.shared.units import MIB
from inference import settings
from inference.authority.placement.ledger import Account, Ledger
from inference.authority.placement.observed_overhead import Before
from inference.devices.device import Reading, environment_of, grants_of
from inference.estimate.estimator import Estimate
from inference.estimate.header_formula import Parts
from inference.estimate.headroom import (
    ENOUGH_GOOD,
    HALF_LIFE_SECONDS,
    MAX_SHARE,
    MIN_BYTES,
    Headroom,
    after_normal_end,
    decayed,
    extra_bytes,
    grown,
)
from inference.estimate.headrooms import Headrooms
from inference.estimate.layers import Sizes
from inference.estimate.overheads import (
    CPU_OVERHEAD_BYTES,
    DRIVER_HOST_BYTES,
    GPU_OVERHEAD_BYTES,
    KEPT,
    MAX_BYTES,
    Overheads,
    host_bytes,
    shape_of,
)
from inference.settings import ModelSpec

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


def test_shape_of_a_model_has_its_own_overhead_from_three_observations_on(state: StateDir) -> None:
    """Before that, those of all shapes on the device count."""
    overheads = Overheads(state)
    for seen in (600, 620, 610):
        overheads.learn(CARD, seen * MIB, "large")
    assert overheads.of(CARD, "small") == overheads.of(CARD, "large") == int(620 * MIB * 1.1)
    for seen in (300, 310, 320):
        overheads.learn(CARD, seen * MIB, "small")
    again = Overheads(state)
    assert (again.of(CARD, "small"), again.of(CARD, "large")) == (int(320 * MIB * 1.1), int(620 * MIB * 1.1))
    assert again.of(replace(CARD, name="H200 NVL"), "small") == GPU_OVERHEAD_BYTES


def test_shape_names_what_pools_depend_on() -> None:
    layers = [Sizes(8 * MIB, 1), Sizes(9 * MIB, 1)]
    assert shape_of("llama", "Q4_K_M", layers, 512) == "llama Q4_K_M, 2 layers of 9 MiB, 512 tokens"
    assert shape_of("llama", "", (), 512) == "llama , 0 layers of 0 MiB, 512 tokens"


def test_overhead_above_the_default_is_used_at_once(state: StateDir) -> None:
    overheads = Overheads(state)
    overheads.learn(CARD, 700 * MIB)
    assert overheads.of(CARD) == int(700 * MIB * 1.1)
    for _ in range(KEPT):
        overheads.learn(CARD, 200 * MIB)
    assert overheads.of(CARD) == int(200 * MIB * 1.1)


def test_driver_of_an_accelerator_takes_host_memory_once_per_process() -> None:
    vulkan = replace(CARD, kind="vulkan")
    assert host_bytes([]) == host_bytes([vulkan]) == CPU_OVERHEAD_BYTES
    more = CPU_OVERHEAD_BYTES + DRIVER_HOST_BYTES["cuda"]
    assert host_bytes([CARD]) == host_bytes([CARD, replace(CARD, id="gpu-1"), vulkan]) == more


def test_implausible_overhead_is_ignored(state: StateDir) -> None:
    overheads = Overheads(state)
    overheads.learn(CARD, MAX_BYTES + 1)
    simulated = replace(CARD, kind="sim", context_bytes=0)
    overheads.learn(simulated, 100 * MIB)
    assert (overheads.of(CARD), overheads.of(simulated)) == (GPU_OVERHEAD_BYTES, 0)


def test_devices_that_were_not_seen_for_long_are_dropped(state: StateDir) -> None:
    overheads = Overheads(state)
    for number in range(260):
        overheads.learn(replace(CARD, name=str(number)), 1000 * MIB)
    assert overheads.of(replace(CARD, name="0")) == GPU_OVERHEAD_BYTES
    assert overheads.of(replace(CARD, name="259")) > GPU_OVERHEAD_BYTES


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
    grown = ledger.grow("old", "gpu-0", 30 * MIB)
    assert before.observed(after, grown, "own", 300 * MIB) == 90 * MIB, "the growth of another model is not its own"
    assert before.observed(after, ledger.leave("old"), "own", 300 * MIB) is None
    other = ledger.reserve("new", "new", {"gpu-0": 1})
    assert before.observed(after, other, "own", 300 * MIB) is None
    assert before.observed(after, other.commit("new", {"gpu-0": 1}), "own", 300 * MIB) is None


def test_process_with_several_devices_sees_them_in_order() -> None:
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


MIB = 2**20
NEED = 1600 * MIB


def test_each_failure_doubles_headroom_from_a_sixteenth_to_a_quarter_of_the_need() -> None:
    room = Headroom()
    seen = []
    for _ in range(6):
        room = grown(room, NEED, 0.0, computing=True)
        seen.append(room.compute_bytes // MIB)
    assert seen == [100, 200, 400, 400, 400, 400]
    assert room.load_bytes == 0


def test_failures_of_loading_and_of_computing_are_separate() -> None:
    room = grown(Headroom(), NEED, 0.0, computing=False)
    assert (room.load_bytes, room.compute_bytes) == (100 * MIB, 0)
    room = grown(room, NEED, 0.0, computing=True)
    assert (room.load_bytes, room.compute_bytes) == (100 * MIB, 100 * MIB)


def test_headroom_of_a_tiny_model_is_one_mebibyte() -> None:
    assert grown(Headroom(), 0, 0.0, computing=True).compute_bytes == MIN_BYTES


def test_three_good_ends_halve_headroom_and_a_small_rest_is_dropped() -> None:
    room = Headroom(0, 3 * MIB)
    for _ in range(ENOUGH_GOOD - 1):
        room = after_normal_end(room, 1.0)
    assert room.compute_bytes == 3 * MIB
    room = after_normal_end(room, 1.0)
    assert room == Headroom(0, 3 * MIB // 2, 0, 1.0)
    for _ in range(ENOUGH_GOOD):
        room = after_normal_end(room, 1.0)
    assert room.is_empty


def test_failure_resets_the_count_of_good_ends() -> None:
    room = after_normal_end(after_normal_end(Headroom(0, 4 * MIB), 0.0), 0.0)
    assert grown(room, NEED, 0.0, computing=False).good == 0


def test_headroom_halves_after_each_whole_hour() -> None:
    room = Headroom(8 * MIB, 4 * MIB, 2, 100.0)
    assert decayed(room, 100.0 + HALF_LIFE_SECONDS - 1) == room
    assert decayed(room, 50.0) == room
    later = decayed(room, 100.0 + 2.5 * HALF_LIFE_SECONDS)
    assert later == Headroom(2 * MIB, MIB, 0, 100.0 + 2 * HALF_LIFE_SECONDS)
    assert decayed(room, 1e12).is_empty


def test_headroom_of_one_failure_never_excludes_a_model() -> None:
    """It is limited to what the empty device can give; after a second failure it is required."""
    assert extra_bytes(Headroom(100 * MIB, 0), NEED, NEED + 300 * MIB) == 100 * MIB
    assert extra_bytes(Headroom(100 * MIB, 0), NEED, NEED + 30 * MIB) == 30 * MIB
    assert extra_bytes(Headroom(100 * MIB, 0), NEED, NEED - MIB) == 0
    assert extra_bytes(Headroom(400 * MIB, 100 * MIB), NEED, NEED + MIB) == MIB
    assert extra_bytes(Headroom(100 * MIB, 200 * MIB), NEED, NEED) == 200 * MIB
    assert extra_bytes(Headroom(100 * MIB, 200 * MIB), NEED, NEED + 250 * MIB) == 250 * MIB


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e6)), max_size=30), st.integers(0, 2**40))
def test_headroom_is_bounded(shortages: list[tuple[bool, float]], need: int) -> None:
    """At most a quarter of the need for each kind, or the minimum."""
    room = Headroom()
    for computing, now in shortages:
        room = grown(room, need, now, computing=computing)
        for count in (room.load_bytes, room.compute_bytes):
            assert 0 <= count <= max(need // MAX_SHARE, need // 16, MIN_BYTES)
        assert not room.is_empty


GPU = Reading("gpu-0", "cuda", "H200", 1000 * MIB, 900 * MIB, 100 * MIB, driver="580.1")
MODEL_NEED = 160 * MIB
PLAIN = Estimate({"gpu-0": Parts(MODEL_NEED, 0, 0)}, {"cpu": MIB}, "llama.cpp", "", 4096)


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    (tmp_path / "models.yaml").write_text(json.dumps({"models": {"a": {"path": str(tmp_path / "x.gguf")}}}))
    return settings.load(tmp_path, {}, {}).models["a"]


def test_headroom_is_stored_per_model_settings_and_device(state: StateDir, spec: ModelSpec) -> None:
    rooms = Headrooms(state, clock=lambda: 1.0)
    assert rooms.short(spec, GPU, MODEL_NEED, computing=True) == 10 * MIB
    again = Headrooms(state, clock=lambda: 1.0)
    assert again.of(spec, GPU).compute_bytes == 10 * MIB
    assert again.of(replace(spec, ubatch=64), GPU).is_empty
    assert again.of(spec, replace(GPU, id="gpu-1")).is_empty
    assert again.of(spec, replace(GPU, driver="590")).is_empty


def test_headroom_is_added_to_the_estimate(state: StateDir, spec: ModelSpec) -> None:
    """Head-room for loading only as far as the device can give it."""
    rooms = Headrooms(state, clock=lambda: 1.0)
    assert rooms.added(spec, [GPU], PLAIN, {"gpu-0": 900 * MIB}) is PLAIN
    rooms.short(spec, GPU, MODEL_NEED, computing=False)
    found = rooms.added(spec, [GPU], PLAIN, {"gpu-0": 900 * MIB})
    assert found.need == {"gpu-0": MODEL_NEED + 10 * MIB, "cpu": MIB}
    assert found.to_json()["devices"]["gpu-0"]["headroom_bytes"] == 10 * MIB
    assert rooms.added(spec, [GPU], PLAIN, {"gpu-0": MODEL_NEED + MIB}).need["gpu-0"] == MODEL_NEED + MIB
    assert rooms.added(spec, [GPU], PLAIN, {}) is PLAIN


def test_configured_overhead_replaces_learned_headroom(state: StateDir, spec: ModelSpec) -> None:
    rooms = Headrooms(state, clock=lambda: 1.0)
    rooms.short(spec, GPU, MODEL_NEED, computing=True)
    configured = replace(spec, memory_overhead=8 * MIB)
    assert rooms.added(configured, [GPU], PLAIN, {"gpu-0": 900 * MIB}) is PLAIN
    assert rooms.short(configured, GPU, NEED, computing=True) == 0
    assert rooms.of(spec, GPU).compute_bytes == 10 * MIB


def test_headroom_shrinks_with_good_ends_and_time(state: StateDir, spec: ModelSpec) -> None:
    """`ended_well` returns whether it changed."""
    now = [0.0]
    rooms = Headrooms(state, clock=lambda: now[0])
    rooms.short(spec, GPU, MODEL_NEED, computing=True)
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
    "content",
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
def test_damaged_file_of_headrooms_is_ignored(state: StateDir, spec: ModelSpec, content: bytes) -> None:
    (state.root / "headroom.json").write_bytes(content)
    rooms = Headrooms(state)
    assert rooms.of(spec, GPU).is_empty
    rooms.short(spec, GPU, MODEL_NEED, computing=True)
    assert Headrooms(state).of(spec, GPU).compute_bytes == 10 * MIB
