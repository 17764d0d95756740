"""Header formula and reader of GGUF headers, compared with real files and figures of llama.cpp."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference.demo import bundled_path
from inference.estimate import estimate_job
from inference.estimate.gguf import BadGgufError, quantization_name, read_facts
from inference.estimate.header_formula import Facts, Parameters, Parts, formula, formula_on, plausible
from inference.worker.llama.binding import lib
from inference.workers.helper_client import run_helper
from tests.rigs import tiny_gguf, tiny_projector

LLAMA_1B = Facts("llama", 16, 2048, 8192, 128256, 131072, 2 * 16 * 8 * 64, 2_500_000_000, 1_950_000_000)


def test_kv_cache_of_a_known_model_is_exact() -> None:
    """Llama 3.2 1B: 16 layers, 8 KV heads of 64: 32 KiB per token in f16."""
    parts = formula(LLAMA_1B, Parameters(8192, 1))
    assert parts.kv_bytes == 8192 * 32768
    assert formula(LLAMA_1B, Parameters(8192, 1, kv_type="q8_0")).kv_bytes == 8192 * 32768 * 34 // 64
    assert parts.total_bytes == parts.weights_bytes + parts.kv_bytes + parts.compute_bytes


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
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "claims"),
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
