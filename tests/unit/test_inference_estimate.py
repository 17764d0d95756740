"""Header formula, layers and limits of GGUF headers, compared with real files and figures of llama.cpp."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.authority.placement.smaller_settings import smaller
from inference.demo import bundled_path
from inference.estimate import estimate_job
from inference.estimate.estimate_job import LayerTrace
from inference.estimate.gguf import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_LAYERS,
    BadGgufError,
    header_problem,
    quantization_name,
    read_facts,
)
from inference.estimate.header_formula import Facts, Parameters, Parts, formula, formula_on, plausible
from inference.estimate.layers import Layers, Sizes, layers_of
from inference.worker.llama.binding import lib
from inference.workers.helper_client import run_helper
from tests.rigs import tiny_families, tiny_gguf, tiny_projector

LLAMA_1B = Facts("llama", 16, 2048, 8192, 128256, 131072, 2 * 16 * 8 * 64, 2_500_000_000, 1_950_000_000)


def test_kv_cache_of_a_known_model_is_exact() -> None:
    """Llama 3.2 1B: 16 layers, 8 KV heads of 64: 32 KiB per token in f16."""
    parts = formula(LLAMA_1B, Parameters(8192, 1))
    assert parts.kv_bytes == 8192 * 32768
    assert formula(LLAMA_1B, Parameters(8192, 1, kv_type="q8_0")).kv_bytes == 8192 * 32768 * 34 // 64
    assert parts.total_bytes == parts.weights_bytes + parts.kv_bytes + parts.compute_bytes


def test_pool_has_its_own_number_of_cells() -> None:
    """Rounded up to 256 cells as a whole; the mask of a step is over all of them."""
    pool = formula(LLAMA_1B, Parameters(4096, 8, kv_cells=10000))
    assert pool.kv_bytes == 10240 * 32768
    one = formula(LLAMA_1B, Parameters(10000, 1))
    assert (pool.kv_bytes, pool.compute_bytes) == (one.kv_bytes, one.compute_bytes)


@given(
    context_length=st.integers(16, 2**17), parallel=st.integers(1, 64), data=st.data(),
    kv_type=st.sampled_from(["f16", "q8_0", "q4_0"]), ubatch=st.integers(1, 4096),
)  # fmt: skip
def test_pool_needs_as_much_cache_as_so_many_own_cells(
    context_length: int, parallel: int, data: st.DataObject, kv_type: str, ubatch: int
) -> None:
    """At most as much as sequences with own cells, at least as much as one, and more with more cells."""
    own = Parameters(context_length, parallel, kv_type=kv_type, ubatch=ubatch)
    pools = sorted(data.draw(st.tuples(*[st.integers(context_length, context_length * parallel)] * 2)))
    small, large = (formula(LLAMA_1B, replace(own, kv_cells=cells)) for cells in pools)
    assert formula(LLAMA_1B, replace(own, parallel=1)).kv_bytes <= small.kv_bytes <= large.kv_bytes
    assert large.kv_bytes <= formula(LLAMA_1B, own).kv_bytes
    assert small.compute_bytes <= large.compute_bytes
    assert small.weights_bytes == large.weights_bytes == LLAMA_1B.weight_bytes


def test_states_of_many_sequences_beside_a_small_pool_are_plausible() -> None:
    """They depend on the number of sequences, not on the cells."""
    parameters = Parameters(1024, 16, kv_cells=1024)
    cells = formula(LLAMA_1B, parameters).kv_bytes
    exact = {"cpu": Parts(LLAMA_1B.weight_bytes, 4 * cells, 0)}
    assert plausible(exact, LLAMA_1B, parameters) is None
    assert plausible(exact, LLAMA_1B, replace(parameters, parallel=1)) is not None


def test_weights_are_divided_by_layers() -> None:
    """The head counts as a layer: nine layers are the head and half of the sixteen others."""
    head = LLAMA_1B.weight_bytes - LLAMA_1B.layer_bytes
    everything = formula_on(LLAMA_1B, Parameters(4096, 1, gpu_layers=-1), {"gpu-0": -1})
    half = formula_on(LLAMA_1B, Parameters(4096, 1, gpu_layers=9), {"gpu-0": -1})
    assert everything["gpu-0"].weights_bytes == LLAMA_1B.weight_bytes
    assert everything["cpu"].weights_bytes == head
    assert half["gpu-0"].kv_bytes == half["cpu"].kv_bytes
    assert half["gpu-0"].weights_bytes == LLAMA_1B.layer_bytes // 2 + head
    assert set(formula_on(LLAMA_1B, Parameters(4096, 1, gpu_layers=0), {"gpu-0": -1})) == {"cpu"}


def test_layers_are_divided_over_accelerators_in_order() -> None:
    parts = formula_on(LLAMA_1B, Parameters(4096, 1, gpu_layers=-1), {"gpu-0": 4, "gpu-1": 13})
    assert parts["gpu-0"].weights_bytes == LLAMA_1B.layer_bytes // 4
    assert sum(item.weights_bytes for item in parts.values()) == 2 * LLAMA_1B.weight_bytes - LLAMA_1B.layer_bytes
    assert parts["gpu-1"].kv_bytes == 3 * parts["gpu-0"].kv_bytes
    assert parts["cpu"].kv_bytes == 0


def test_host_expert_layers_move_experts_of_whole_layers_to_the_host() -> None:
    """Those of layers on the host are there anyway."""
    facts = Facts("x", 4, 8, 8, 8, 8, 8, 420, 400, by_layer=((100, 1, 70),) * 4, experts=8, experts_used=2)
    everything = Parameters(256, 1, gpu_layers=-1)
    for layers, gpu_layers, moved in ((0, -1, 0), (1, -1, 70), (512, -1, 280), (3, 3, 70), (2, 3, 0)):
        parameters = replace(everything, gpu_layers=gpu_layers)
        together = formula_on(facts, parameters, {"gpu-0": -1})
        apart = formula_on(facts, replace(parameters, host_expert_layers=layers), {"gpu-0": -1})
        assert together["gpu-0"].weights_bytes - apart["gpu-0"].weights_bytes == moved
        assert apart["cpu"].weights_bytes - together["cpu"].weights_bytes == moved
    split = formula_on(facts, replace(everything, host_expert_layers=3), {"gpu-0": 2, "gpu-1": 3})
    assert {name: parts.weights_bytes for name, parts in split.items()} == {"gpu-0": 60, "gpu-1": 150, "cpu": 230}


def test_experts_of_each_layer_are_read_from_the_header() -> None:
    form = tiny_families.Form("moe", layers=2)
    facts = read_facts(tiny_families.path(form))
    of_a_layer = 3 * tiny_families.EXPERTS * form.width * form.feed * 4
    assert [experts for _weights, _kv, experts in facts.by_layer] == [of_a_layer] * 2
    assert (facts.experts, facts.experts_used) == (tiny_families.EXPERTS, 2)
    assert {experts for _weights, _kv, experts in read_facts(tiny_gguf.generative()).by_layer} == {0}


def test_implausible_figures_are_detected() -> None:
    right = formula_on(LLAMA_1B, Parameters(4096, 1), {})
    assert plausible(right, LLAMA_1B, Parameters(4096, 1)) is None
    for wrong in (Parts(0, 0, 0), replace(right["cpu"], kv_bytes=10**12)):
        assert plausible({"cpu": wrong}, LLAMA_1B, Parameters(4096, 1))


def test_header_formula_agrees_with_llama_cpp() -> None:

    path = tiny_gguf.generative()
    facts = read_facts(path)
    job = {"path": str(path), "parameters": {"context_length": 512, "parallel": 4}}
    answer = asyncio.run(run_helper("estimate", job, seconds=60))
    assert answer["source"] == "llama.cpp", answer
    exact, rough = answer["parts"]["cpu"], answer["rough"]["cpu"]
    assert exact["kv_bytes"] == rough["kv_bytes"]
    assert exact["weights_bytes"] == pytest.approx(facts.weight_bytes, rel=0.05)
    assert exact["compute_bytes"] <= rough["compute_bytes"] * 1.1


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda data: b"", "(instead of GGUF|beginning with GGUF)"),
        (lambda data: b"ZZZZ" + data[4:], "(instead of GGUF|beginning with GGUF)"),
        (lambda data: data[:4] + b"\x09" + data[5:], "version is 9"),
        (lambda data: data[:60], "ends inside its header: the file is incomplete, copy it again"),
        (lambda data: data[:-2000], "cut short.*copy it again"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "the maximum is"),
    ],
)
def test_damaged_files_are_described(damage: object, word: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damage(tiny_gguf.generative().read_bytes()))  # type: ignore[operator]
    with pytest.raises(BadGgufError, match=word):
        read_facts(path)
    job = {"path": str(path), "parameters": {"context_length": 16, "parallel": 1}}
    assert str(path) in estimate_job.run(job)["error"]


def test_unusable_parts_of_a_split_file_are_described(tmp_path: Path) -> None:
    parts = tiny_gguf.in_parts(tmp_path)
    with pytest.raises(BadGgufError, match=f"it is part 2 of 3; configure the first part: {parts[0].name}"):
        read_facts(parts[1])
    parts[2].write_bytes(parts[2].read_bytes()[:-64])
    with pytest.raises(BadGgufError, match=f"its part {parts[2].name} is unusable: it is cut short"):
        read_facts(parts[0])
    renamed = parts[0].rename(tmp_path / "model.gguf")
    with pytest.raises(BadGgufError, match=r"the first of 3 parts; its name must be NAME-00001-of-00003\.gguf"):
        read_facts(renamed)


def test_weights_of_all_parts_are_counted(tmp_path: Path) -> None:
    whole = read_facts(tiny_gguf.generative())
    divided = read_facts(tiny_gguf.in_parts(tmp_path)[0])
    assert (divided.weight_bytes, divided.by_layer) == (whole.weight_bytes, whole.by_layer)


@pytest.mark.parametrize(
    ("path", "advice"),
    [(tiny_projector.projector, "configure it as `mmproj`"), (tiny_gguf.lora, "configure it under `lora`")],
)
def test_projector_or_adapter_as_a_model_is_rejected_with_advice(path: Callable[[], Path], advice: str) -> None:
    with pytest.raises(BadGgufError, match=advice):
        read_facts(path())


def test_file_cut_at_any_place_is_described(tmp_path: Path) -> None:
    whole = tiny_gguf.generative().read_bytes()
    path = tmp_path / "cut.gguf"
    messages = set()
    for length in [*range(4, 600, 5), *range(600, len(whole) - 1, 9973)]:
        path.write_bytes(whole[:length])
        with pytest.raises(BadGgufError) as caught:
            read_facts(path)
        messages.add(str(caught.value).partition(":")[0])
    assert messages == {"it ends inside its header", "it is cut short"}


def test_missing_file_is_described() -> None:
    result = estimate_job.run({"path": "/no/such.gguf", "parameters": {"context_length": 16, "parallel": 1}})
    assert "/no/such.gguf cannot be read" in result["error"]


def test_bundled_model_is_q8_0() -> None:
    path = bundled_path("demo")
    assert path is not None
    facts = read_facts(path)
    assert (facts.architecture, facts.quantization) == ("llama", "Q8_0")


def test_names_of_quantizations_are_those_of_llama_cpp() -> None:
    kinds = {name: number for name, number in vars(lib).items() if name.startswith("LLAMA_FTYPE_")}
    known = {name.removeprefix("LLAMA_FTYPE_MOSTLY_").removeprefix("LLAMA_FTYPE_ALL_"): kinds[name] for name in kinds}
    assert len(known) > 30
    for name, number in known.items():
        if name != "LLAMA_FTYPE_GUESSED":
            assert quantization_name({"general.file_type": number}) == name


@pytest.mark.parametrize("metadata", [{}, {"general.file_type": 9999}, {"general.file_type": "Q4_0"}])
def test_unknown_quantization_has_no_name(metadata: dict[str, Any]) -> None:
    assert quantization_name(metadata) == ""


GOOD = {"block_count": 32, "context_length": 4096, "embedding_length": 4096}
MIXTURE = {"expert_count": 8, "expert_used_count": 2}


def problem(architecture: str = "llama", **changes: object) -> str | None:
    """The problem of a valid header with `changes`; `__` in a name stands for a dot."""
    return header_problem(architecture, GOOD | {key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_count": 1, "context_length": 1, "embedding_length": 1},
        {"block_count": MAX_LAYERS, "context_length": MAX_CONTEXT},
        {"attention__head_count": 0},
        MIXTURE,
        MIXTURE | {"expert_used_count": [2] * 32},
        MIXTURE | {"expert_group_count": 1},
        MIXTURE | {"expert_group_count": 4, "expert_group_used_count": 2},
        {"expert_count": MAX_EXPERTS, "expert_used_count": MAX_EXPERTS},
        {"nextn_predict_layers": 32},
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__freq_base": 1e6},
        {"attention__layer_norm_rms_epsilon": 1e-5},
    ],
)
def test_header_that_llama_cpp_accepts_is_not_rejected(changes: dict[str, object]) -> None:
    """The limits themselves are valid, and so are models without attention (head_count 0)."""
    assert problem(**changes) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": 0}, "llama.block_count is 0, but must be a whole number from 1 to 512"),
        ({"block_count": MAX_LAYERS + 1}, "block_count is 513"),
        ({"block_count": "two"}, "block_count is 'two'"),
        ({"block_count": True}, "block_count is True"),
        ({"context_length": 0}, "context_length is 0, but must be a whole number from 1 to 134217728"),
        ({"context_length": 2**32 - 1}, "context_length is 4294967295"),
        ({"embedding_length": 0}, "embedding_length is 0"),
        ({"nextn_predict_layers": 33}, "nextn_predict_layers is 33, but there are 32 layers"),
        ({"expert_count": MAX_EXPERTS + 1, "expert_used_count": 1}, "expert_count is 1025; the limit is 1024"),
        ({"expert_count": 8}, "expert_used_count is 0, but there are 8 experts"),
        ({"expert_used_count": 1}, "expert_used_count is 1, but there are 0 experts"),
        (MIXTURE | {"expert_used_count": [2, 9]}, "expert_used_count is 9, but there are 8 experts"),
        ({"expert_group_count": 1}, "expert_group_count is 1, but there are 0 experts"),
        (MIXTURE | {"expert_group_count": 8}, "expert_group_count is 8, but there are 8 experts"),
        (MIXTURE | {"expert_group_count": 3, "expert_group_used_count": 1}, "expert_group_count is 3"),
        (MIXTURE | {"expert_group_count": 4}, "of which 0 are used"),
        (MIXTURE | {"expert_group_count": 4, "expert_group_used_count": 4}, "of which 4 are used"),
        ({"attention__layer_norm_rms_epsilon": -1.0}, "attention.layer_norm_rms_epsilon is -1.0"),
        ({"rope__freq_base": math.nan}, "rope.freq_base is nan"),
        ({"rope__scaling__factor": math.inf}, "rope.scaling.factor is inf"),
        ({"rope__scaling__type": "rubber"}, "supported values: none, linear, yarn, longrope"),
    ],
)
def test_header_that_llama_cpp_aborts_on_is_rejected_with_its_field(changes: dict[str, object], message: str) -> None:
    found = problem(**changes)
    assert found is not None
    assert message in found


@pytest.mark.parametrize("key", GOOD)
def test_missing_field_is_named(key: str) -> None:
    header = {name: value for name, value in GOOD.items() if name != key}
    assert header_problem("qwen3", header) == f"qwen3.{key} is missing in its header"


def test_one_expert_is_valid_for_hunyuan_models() -> None:
    assert problem("hunyuan-dense", expert_count=1) is None
    assert problem("llama", expert_count=1) is not None


SIZES = (Sizes(100, 40), Sizes(100, 40), Sizes(100, 20, False), Sizes(100, 0))
ALL = Parameters(1024, 2, gpu_layers=-1)


def test_sizes_of_layers_follow_from_a_measurement_on_one_device() -> None:
    """Unexplained weights belong to the head and the embeddings; caches are scaled to the exact sum."""
    exact = {"gpu-0": Parts(470, 200, 30), "cpu": Parts(60, 0, 5)}
    layers = layers_of(ALL, exact, "gpu-0", SIZES)
    assert layers is not None
    assert (layers.head_bytes, layers.input_bytes, layers.places, layers.offloaded) == (70, 60, 5, 5)
    assert [size.kv_bytes for size in layers.sizes] == [80, 80, 40, 0]
    assert layers.need({"gpu-0": 5}, {"gpu-0": 7, "cpu": 9}) == {"gpu-0": 707, "cpu": 74}


def test_last_layers_and_the_head_are_offloaded_first() -> None:
    exact = {"gpu-0": Parts(270, 60, 30), "cpu": Parts(260, 40, 5)}
    layers = layers_of(Parameters(1024, 2, gpu_layers=3), exact, "gpu-0", SIZES)
    assert layers is not None
    assert (layers.offloaded, layers.head_bytes, layers.input_bytes) == (3, 70, 60)
    assert layers.need({"gpu-0": 3}, {})["gpu-0"] == 200 + 20 + 70 + 30


def test_model_on_the_host_needs_host_memory_only() -> None:
    layers = layers_of(Parameters(1024, 2), {"cpu": Parts(500, 100, 30)}, None, SIZES)
    assert layers is not None
    assert layers.need({}, {"cpu": 4}) == {"cpu": 634}


@pytest.mark.parametrize(("exact", "sizes"), [({}, SIZES), ({"gpu-0": Parts(1, 1, 1)}, ())])
def test_inconsistent_measurement_gives_no_layers(exact: dict[str, Parts], sizes: tuple[Sizes, ...]) -> None:
    assert layers_of(ALL, exact, "gpu-0", sizes) is None


def test_total_cache_is_divided_equally_among_layers_of_unknown_cache_size() -> None:
    layers = layers_of(ALL, {"gpu-0": Parts(400, 100, 0)}, "gpu-0", [Sizes(100, 0)] * 4)
    assert layers is not None
    assert {size.kv_bytes for size in layers.sizes} == {25}


EXPERTS = tuple(Sizes(100, 40, True, experts) for experts in (0, 70, 80, 0))


@pytest.mark.parametrize("apart", [0, 1, 2, 3, 512])
@pytest.mark.parametrize("gpu_layers", [-1, 3])
def test_experts_are_moved_from_the_device_of_their_layer_to_the_host(apart: int, gpu_layers: int) -> None:
    """Whichever placement was measured, the same bytes follow for all others."""
    together = Layers(Parameters(1024, 2, gpu_layers=gpu_layers, ubatch=1), EXPERTS, 70, 60, 5000, 6000)
    moved = sum(size.expert_bytes for size in EXPERTS[together.places - together.offloaded : apart])
    found = together.changed(host_expert_layers=apart)
    before, after = (layers.need({"gpu-0": together.offloaded}, {}) for layers in (together, found))
    assert before["gpu-0"] - after["gpu-0"] == moved == after["cpu"] - before["cpu"]
    cache = 40 * (together.offloaded - 1)
    weights = {
        "gpu-0": Parts(after["gpu-0"] - cache - 5000, cache, 5000),
        "cpu": Parts(after["cpu"] - (160 - cache) - 6000, 160 - cache, 6000),
    }
    assert layers_of(found.parameters, weights, "gpu-0", EXPERTS) == found


def test_experts_in_host_memory_of_several_devices() -> None:
    """llama.cpp then makes no copies of the inputs; the host computes too."""
    layers = Layers(Parameters(1000, 1, gpu_layers=-1, ubatch=10, host_expert_layers=3), EXPERTS, 70, 60, 50_000, 7)
    assert layers.need({"gpu-0": 3, "gpu-1": 2}, {"gpu-1": 1}) == {
        "gpu-0": 3 * 140 - 150 + 50_000, "gpu-1": 140 + 70 + 50_000 + 1, "cpu": 60 + 150 + 50_000,
    }  # fmt: skip
    assert layers.last_expert_layer == 3
    assert replace(layers, parameters=Parameters(1000, 1, gpu_layers=2)).last_expert_layer == 0


def test_a_token_reads_the_used_share_of_the_experts() -> None:
    """Of the embeddings it reads one row; on the host they may be the output matrix as well."""
    layers = Layers(Parameters(1000, 1, gpu_layers=-1), EXPERTS, 70, 60, 0, 0)
    assert layers.active_bytes({"gpu-0": 5}, 0.1) == {"gpu-0": 470 - 150 + 15, "cpu": 0}
    apart = layers.changed(host_expert_layers=2)
    assert (layers.exchanges({"gpu-0": 5}), apart.exchanges({"gpu-0": 2, "gpu-1": 3}), apart.exchanges({})) == (0, 1, 0)
    assert apart.active_bytes({"gpu-0": 2, "gpu-1": 3}, 0.1) == {"gpu-0": 200 - 70, "gpu-1": 270 - 80 + 8, "cpu": 7}
    assert layers.changed(gpu_layers=2).active_bytes({"gpu-0": 2}, 0.5) == {"gpu-0": 170, "cpu": 300 - 75}
    assert layers.changed(gpu_layers=0).active_bytes({}, 1.0) == {"cpu": 400 + 70 + 60}


def test_several_devices_hold_copies_of_the_inputs() -> None:
    """With all layers on accelerators, each device holds four masks, so that they work at the same time."""
    layers = Layers(Parameters(1000, 1, gpu_layers=-1, ubatch=10), (Sizes(1, 1),) * 4, 0, 0, 50_000, 0)
    assert layers.copies_bytes == 3 * 20_000
    divided = layers.need({"gpu-0": 2, "gpu-1": 3}, {})
    assert divided["gpu-0"] == 4 + 50_000 + 60_000
    partly = layers.changed(gpu_layers=4)
    assert partly.copies_bytes == 0


def test_smaller_pool_shrinks_caches_and_buffers() -> None:
    """As much as the same number of own cells; fewer parallel sequences change nothing."""
    parameters = Parameters(1000, 8, kv_cells=4000, gpu_layers=-1, ubatch=10)
    layers = Layers(parameters, SIZES, 0, 0, 100_000, 0)
    assert layers.mask_bytes == 80_000
    half = layers.changed(kv_cells=2000)
    assert [size.kv_bytes for size in half.sizes] == [21, 21, 20, 0]
    assert 100_000 - 40_000 <= half.compute_bytes < 100_000 - 35_000
    assert layers.changed(parallel=4).sizes == layers.sizes


def test_smaller_settings_shrink_caches_and_buffers() -> None:
    layers = Layers(Parameters(1000, 4, gpu_layers=-1, ubatch=10), SIZES, 0, 0, 50_000, 0)
    half = layers.changed(context_length=500)
    assert [size.kv_bytes for size in half.sizes] == [21, 21, 20, 0]
    assert 50_000 - 10_000 <= half.compute_bytes < 50_000
    assert [size.kv_bytes for size in layers.changed(kv_type="q8_0").sizes] == [22, 22, 20, 0]
    assert layers.changed(parallel=4) == layers


@pytest.mark.parametrize(
    ("fix", "next_one"),
    [
        ({"gpu_layers": 3, "context_length": 512}, {"gpu_layers": 2, "context_length": 512}),
        ({"gpu_layers": 1}, {}),
        ({"experts": 3}, {"experts": 4}),
        ({"experts": 3, "context_length": 512}, {"experts": 4, "context_length": 512}),
        ({"experts": 3, "gpu_layers": 2}, {"experts": 3, "gpu_layers": 1}),
        ({"context_length": 4096, "parallel": 1}, {"context_length": 3840, "parallel": 1}),
        ({"context_length": 512}, {}),
        ({"parallel": 3}, {"parallel": 2}),
        ({"parallel": 1}, {}),
        ({"kv_type": "q8_0"}, {"kv_type": "q4_0"}),
        ({"kv_type": "q4_0"}, {}),
        ({"kv_cells": 8192}, {"kv_cells": 7680}),
        ({"kv_cells": 4096}, {}),
        ({"kv_cells": 4096, "context_length": 4096}, {"kv_cells": 3840, "context_length": 3840}),
        ({"kv_cells": 512, "context_length": 512, "gpu_layers": 1}, {}),
    ],
)
def test_next_smaller_fix_changes_one_setting(fix: dict[str, object], next_one: dict[str, object]) -> None:
    assert smaller(fix, 4096) == next_one


LOG = """llama_kv_cache: layer   0: dev = CPU
llama_kv_cache: layer   2: dev = CPU
llama_kv_cache:        CPU KV buffer size =     0.00 MiB
llama_kv_cache: size =    4.00 MiB (  2048 cells,   2 layers,  4/1 seqs), K (f16):    2.00 MiB, V (f16):    2.00 MiB
llama_memory_recurrent, layer   1: dev = CPU
llama_memory_recurrent: size =    1.00 MiB (     4 cells,   3 layers,  4 seqs), R (f32):    1.00 MiB
"""
FACTS = Facts("x", 3, 8, 8, 8, 8, 8, 40, 30, by_layer=((10, 1, 4), (10, 1, 0), (10, 1, 0)))


def test_caches_of_layers_are_read_from_the_log() -> None:
    trace = LayerTrace()
    for start in range(0, len(LOG), 50):
        trace.feed(LOG[start : start + 50])
    mib = 2**20
    assert trace.layers(FACTS, 5 * mib) == [(10, 2 * mib, True, 4), (10, mib, False, 0), (10, 2 * mib, True, 0)]


IN_POOL = """llama_kv_cache_iswa: creating non-SWA KV cache, size = 2048 cells
llama_kv_cache: layer   0: dev = CPU
llama_kv_cache: size =    4.00 MiB (  2048 cells,   1 layers,  4/1 seqs), K (f16):    2.00 MiB, V (f16):    2.00 MiB
llama_kv_cache_iswa: creating     SWA KV cache, size = 2048 cells
llama_kv_cache: layer   1: dev = CPU
llama_kv_cache: size =    4.00 MiB (  2048 cells,   1 layers,  4/1 seqs), K (f16):    2.00 MiB, V (f16):    2.00 MiB
"""


def test_checkpoint_of_a_sequence_in_a_pool_has_its_window() -> None:
    """Also if the windows of all sequences would take more cells than the pool has."""
    trace = LayerTrace()
    trace.feed(IN_POOL)
    assert trace.checkpoint_bytes(4, 512, sharing=4) == 2**20
    assert trace.checkpoint_bytes(4, 0) == 0


def test_log_that_does_not_explain_the_sum_is_ignored() -> None:
    trace = LayerTrace()
    trace.feed(LOG)
    of_header = [(10, 1, True, 4), (10, 1, True, 0), (10, 1, True, 0)]
    assert trace.layers(FACTS, 50 * 2**20) == of_header
    assert LayerTrace().layers(FACTS, 0) == of_header
