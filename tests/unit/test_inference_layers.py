"""Layers of a model: sizes from one measurement, placement as in llama.cpp, smaller settings."""

from __future__ import annotations

import pytest

from inference.authority.placement.fix import smaller
from inference.estimate.estimate_job import LayerTrace
from inference.estimate.header_formula import Facts, Parameters, Parts
from inference.estimate.layers import Layers, Sizes, layers_of

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


def test_caches_of_unknown_size_are_equal() -> None:
    layers = layers_of(ALL, {"gpu-0": Parts(400, 100, 0)}, "gpu-0", [Sizes(100, 0)] * 4)
    assert layers is not None
    assert {size.kv_bytes for size in layers.sizes} == {25}


def test_several_devices_hold_copies_of_the_inputs() -> None:
    """With all layers on accelerators, each device holds four masks, so that they work at the same time."""
    layers = Layers(Parameters(1000, 1, gpu_layers=-1, ubatch=10), (Sizes(1, 1),) * 4, 0, 0, 50_000, 0)
    assert layers.copies_bytes == 3 * 20_000
    divided = layers.need({"gpu-0": 2, "gpu-1": 3}, {})
    assert divided["gpu-0"] == 4 + 50_000 + 60_000
    partly = layers.changed(gpu_layers=4)
    assert partly.copies_bytes == 0


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
        ({"context_length": 4096, "parallel": 1}, {"context_length": 3840, "parallel": 1}),
        ({"context_length": 512}, {}),
        ({"parallel": 3}, {"parallel": 2}),
        ({"parallel": 1}, {}),
        ({"kv_type": "q8_0"}, {"kv_type": "q4_0"}),
        ({"kv_type": "q4_0"}, {}),
    ],
)
def test_next_smaller_fix(fix: dict[str, object], next_one: dict[str, object]) -> None:
    assert smaller(fix) == next_one


LOG = """llama_kv_cache: layer   0: dev = CPU
llama_kv_cache: layer   2: dev = CPU
llama_kv_cache:        CPU KV buffer size =     0.00 MiB
llama_kv_cache: size =    4.00 MiB (  2048 cells,   2 layers,  4/1 seqs), K (f16):    2.00 MiB, V (f16):    2.00 MiB
llama_memory_recurrent, layer   1: dev = CPU
llama_memory_recurrent: size =    1.00 MiB (     4 cells,   3 layers,  4 seqs), R (f32):    1.00 MiB
"""
FACTS = Facts("x", 3, 8, 8, 8, 8, 8, 40, 30, by_layer=((10, 1), (10, 1), (10, 1)))


def test_caches_of_layers_are_read_from_the_log() -> None:
    trace = LayerTrace()
    for start in range(0, len(LOG), 50):
        trace.feed(LOG[start : start + 50])
    mib = 2**20
    assert trace.layers(FACTS, 5 * mib) == [(10, 2 * mib, True), (10, mib, False), (10, 2 * mib, True)]


def test_log_that_does_not_explain_the_sum_is_ignored() -> None:
    trace = LayerTrace()
    trace.feed(LOG)
    assert trace.layers(FACTS, 50 * 2**20) == [(10, 1, True)] * 3
    assert LayerTrace().layers(FACTS, 0) == [(10, 1, True)] * 3
