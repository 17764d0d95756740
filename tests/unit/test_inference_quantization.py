"""The quantization of a file has the usual name of its format."""

from __future__ import annotations

from typing import Any

import pytest

from inference.demo import bundled_path
from inference.estimate.gguf import quantization_name, read_facts
from inference.worker.llama.binding import lib


def test_the_bundled_models_are_q8_0() -> None:
    path = bundled_path("demo")
    assert path is not None
    facts = read_facts(path)
    assert (facts.architecture, facts.quantization) == ("llama", "Q8_0")


def test_the_names_are_those_of_llama_cpp() -> None:
    kinds = {name: number for name, number in vars(lib).items() if name.startswith("LLAMA_FTYPE_")}
    known = {name.removeprefix("LLAMA_FTYPE_MOSTLY_").removeprefix("LLAMA_FTYPE_ALL_"): kinds[name] for name in kinds}
    assert len(known) > 30
    for name, number in known.items():
        if name != "LLAMA_FTYPE_GUESSED":
            assert quantization_name({"general.file_type": number}) == name


@pytest.mark.parametrize("metadata", [{}, {"general.file_type": 9999}, {"general.file_type": "Q4_0"}])
def test_what_is_not_said_is_empty(metadata: dict[str, Any]) -> None:
    assert quantization_name(metadata) == ""
