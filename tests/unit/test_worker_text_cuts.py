"""Long texts are cut only before special tokens whose text no other one overlaps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference.demo import bundled_path
from inference.worker import llama
from inference.worker.llama.llama_log import LogTail
from inference.worker.llama.text_cuts import Cutter
from tests.rigs.worker_rig import grant_for

CONTROLS = ["<a>", "<ab>", "<|end|>"]
ATOMS = [*CONTROLS, "x<a", ">>"]


@given(st.lists(st.sampled_from([*ATOMS, "x", "<", " ", "é"]), max_size=60).map("".join), st.integers(1, 12))
def test_parts_join_to_the_text_and_begin_with_a_control_text(text: str, size: int) -> None:
    parts = Cutter(CONTROLS, ATOMS, size).parts(text)
    assert "".join(parts) == text
    assert all(part.startswith(tuple(CONTROLS)) for part in parts[1:])
    assert all(len(part) >= size for part in parts[:-1])


def test_no_cut_inside_another_special_text() -> None:
    """Where "x<a" may be the token, nothing is cut before "<a>"."""
    assert Cutter(CONTROLS, ATOMS, 1).parts("yx<a>y<a>y") == ["yx<a>y", "<a>y"]
    assert Cutter([], ["x<a"], 1).parts("yx<a>") == ["yx<a>"]


def test_parts_tokenize_as_the_whole() -> None:
    llama.start(LogTail(lambda _line: None))
    model = llama.Model(str(bundled_path("demo-mini")), llama.model_params(grant_for(bundled_path("demo-mini"))))
    try:
        text = "".join(
            f"<|im_start|>user\nwhat is {number}<|im_end|>\n" + " \n"[: number % 3] + "<|im_start|>" * (number % 2)
            for number in range(1500)
        )
        whole = model._tokenize(text, False, True)
        assert model.tokenize(text, parse_special=True) == whole
        assert model.tokenize(text, parse_special=True, add_special=True) == model._tokenize(text, True, True)
        assert model.tokenize(text) == model._tokenize(text, False, False)
    finally:
        model.close()
