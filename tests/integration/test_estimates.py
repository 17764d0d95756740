"""Estimated bytes of a model equal the allocated bytes, in every case."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inference.worker.kv.checkpoints import max_checkpoints
from tests.rigs.engine_rig import engine_rig
from tests.rigs.estimate_rig import MIB, Case, EstimateRig
from tests.rigs.tiny_families import EXPERTS, FAMILIES, Form

CASES = {
    "dense": [("q8_0", 0, 4, ()), ("f16", -1, 2, (3, 4))],
    "gqa": [("q8_0", -1, 4, ()), ("f16", 0, 2, ())],
    "moe": [("q4_0", 5, 1, ())],
    "window": [("f16", -1, 2, ()), ("q8_0", 0, 2, ())],
    "hybrid": [("f16", 4, 4, ()), ("f16", -1, 1, (2, 5))],
    "recurrent": [("f16", 0, 4, ()), ("f16", -1, 2, ())],
}
"""By family: KV type, layers on the accelerator, parallel sequences, layers per device."""


@pytest.mark.parametrize("family", FAMILIES)
async def test_estimated_bytes_equal_allocated_bytes(family: str, tmp_path: Path) -> None:
    """Within 1 % or 16 MiB on every device, as the worker reports and the simulated devices count."""
    form = Form(family, heads_kv=8 if family in ("moe", "window") else 4)
    async with EstimateRig(tmp_path, [700 * MIB] * 2) as rig:
        for kv_type, gpu_layers, parallel, counts in CASES[family]:
            case = Case(form, 24576 // parallel, parallel, kv_type, gpu_layers, counts)
            await check(rig, case)


@pytest.mark.parametrize(
    ("family", "gpu_layers", "kv_cells", "counts"),
    [
        ("gqa", -1, 10_000, ()), ("gqa", 0, 24_576, ()), ("dense", -1, 12_000, (3, 4)), ("window", 0, 20_000, ()),
        ("window", -1, 6144, (3, 4)), ("hybrid", 4, 7000, ()), ("recurrent", 0, 6144, ()),
    ],
)  # fmt: skip
async def test_estimated_bytes_of_a_pool_equal_allocated_bytes(
    family: str, gpu_layers: int, kv_cells: int, counts: tuple[int, ...], tmp_path: Path
) -> None:
    """Within 1 % or 16 MiB, and never more than for sequences with own cells."""
    form = Form(family, heads_kv=8 if family == "window" else 4)
    case = Case(form, 6144, 8, "f16", gpu_layers, counts, kv_cells=kv_cells)
    async with EstimateRig(tmp_path, [700 * MIB] * 2) as rig:
        await check(rig, case)
        pool, own = await rig.estimate(case), await rig.estimate(replace(case, kv_cells=None))
    for device, parts in pool.parts.items():
        assert parts.kv_bytes <= own.parts[device].kv_bytes


@pytest.mark.parametrize(("experts", "gpu_layers", "counts"), [("host", -1, ()), (4, 5, ()), (2, -1, (3, 4))])
async def test_experts_in_host_memory_are_booked_there(
    experts: str | int, gpu_layers: int, counts: tuple[int, ...], tmp_path: Path
) -> None:
    """The weights of these experts move from the first device to the host; no cache moves."""
    form = Form("moe", heads_kv=8)
    case = Case(form, 4096, 2, "f16", gpu_layers, counts, experts=experts)
    async with EstimateRig(tmp_path, [700 * MIB] * 2) as rig:
        await check(rig, case)
        apart, together = await rig.estimate(case), await rig.estimate(replace(case, experts="device"))
    moved = {name: parts.weights_bytes - together.parts[name].weights_bytes for name, parts in apart.parts.items()}
    of_a_layer = 3 * EXPERTS * form.width * form.feed * 4
    layers = {"host": 6, 4: 2, 2: 2}[experts]  # with 5 places on the accelerator, the first 2 layers are on the host
    assert moved["cpu"] == layers * of_a_layer == -moved["gpu-0"]
    for name, parts in apart.parts.items():
        assert parts.kv_bytes == together.parts[name].kv_bytes


async def test_devices_that_share_each_tensor_have_the_estimated_bytes(tmp_path: Path) -> None:
    """Also with sliding windows, and with layers and experts on the host. If llama.cpp does not divide an architecture,
    the estimate has the reason.
    """
    cases = [
        Case(Form("window", heads_kv=8), 4096, 2, "q8_0", -1, (5, 2), split_mode="tensor"),
        Case(Form("moe", heads_kv=8), 4096, 2, "f16", 4, (2, 2), experts=5, split_mode="tensor"),
    ]
    async with EstimateRig(tmp_path, [700 * MIB] * 2) as rig:
        for case in cases:
            await check(rig, case)
        alone = Case(Form("recurrent"), 4096, 2, "f16", -1, (), split_mode="tensor")
        found = await rig.estimate(alone)
    assert found.split_problem.endswith("not implemented for architecture 'mamba'; set split_mode: layer")


@pytest.mark.parametrize(("gpu_layers", "counts"), [(3, ()), (-1, (3, 4))])
async def test_draft_model_is_booked_on_the_first_device(
    gpu_layers: int, counts: tuple[int, ...], tmp_path: Path
) -> None:
    """With all of its layers; no other device has more, and its weights and cache are far above the tolerance. On one
    device the split mode makes no difference.
    """
    draft = Form("dense", layers=3)
    case = Case(Form("gqa"), 12_000, 4, "f16", gpu_layers, counts, split_mode="tensor", draft=draft)
    async with EstimateRig(tmp_path, [900 * MIB] * 2) as rig:
        await check(rig, case)
        both, alone = await rig.estimate(case), await rig.estimate(replace(case, draft=None))
    assert both.parts == alone.parts
    assert both.draft_bytes["gpu-0"] > 60 * MIB
    assert "gpu-1" not in both.draft_bytes
    assert both.need["gpu-0"] - alone.need["gpu-0"] == both.draft_bytes["gpu-0"]


async def check(rig: EstimateRig, case: Case) -> None:
    """The estimate of llama.cpp for the case is right."""
    outcome = await rig.load(case)
    assert outcome.source == "llama.cpp"
    assert outcome.worst <= 1, f"{case.name}: {list(outcome.errors())}"
    on_devices = {"gpu-0", "gpu-1"} if case.counts else {"gpu-0"} if case.gpu_layers else set()
    assert set(outcome.counted) == on_devices


@pytest.mark.parametrize(
    ("family", "kv_cells"),
    [("dense", None), ("window", None), ("window", 12_000), ("hybrid", None), ("hybrid", 8192), ("recurrent", 12_000)],
)
async def test_host_memory_for_checkpoints_is_reserved(family: str, kv_cells: int | None, tmp_path: Path) -> None:
    """The checkpoints of all sequences are a part of the estimate; a model without windows and states has none."""
    form = Form(family, heads_kv=4)
    case = Case(form, 8192, 2, "f16", 0, kv_cells=kv_cells)
    spec = case.spec()
    async with EstimateRig(tmp_path, []) as rig:
        (cpu,) = rig.devices(case)
        with_none = await rig.estimator.get(replace(spec, kv_checkpoints=0), cpu)
        estimate = await rig.estimator.get(replace(spec, kv_checkpoints=8 * MIB), cpu)
    sizes = {"context_length": 8192, "parallel": 2, "kv_cells": kv_cells}
    with engine_rig(spec.path, **sizes, checkpoint_bytes=8 * MIB) as opened:
        each = opened.context.checkpoint_bytes
        most = max_checkpoints(each, 8 * MIB)
    reserved = estimate.need["cpu"] - with_none.need["cpu"]
    assert reserved == pytest.approx(2 * most * each, rel=0.05, abs=MIB / 8)
    assert (reserved > 0) == (family != "dense")


async def test_estimate_of_one_device_applies_to_an_equal_device(tmp_path: Path) -> None:
    """The second device needs no helper; the estimate of the first one applies."""
    case = Case(Form("gqa"), 4096, gpu_layers=-1)
    async with EstimateRig(tmp_path, [100 * MIB] * 2) as rig:
        assert rig.sims is not None
        first, second = rig.sims.readings()
        one = await rig.estimator.get(case.spec(), first)
        kept = rig.state.file("estimates.json").read_bytes()
        other = await rig.estimator.get(case.spec(), second)
        assert rig.state.file("estimates.json").read_bytes() == kept
        assert other.parts == {"gpu-1": one.parts["gpu-0"], "cpu": one.parts["cpu"]}
