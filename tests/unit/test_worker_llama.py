"""llama.cpp: texts are divided before special tokens; its log gives buffers and errors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference.demo import bundled_path
from inference.worker import llama
from inference.worker.llama.llama_model import Cutter
from inference.worker.llama.llama_process import KEPT_LINES, LogTail
from tests.rigs.worker_rig import grant_for

CONTROLS = ["<a>", "<ab>", "<|end|>"]
ATOMS = [*CONTROLS, "x<a", ">>"]


@given(st.lists(st.sampled_from([*ATOMS, "x", "<", " ", "é"]), max_size=60).map("".join), st.integers(1, 12))
def test_parts_join_to_the_text_and_start_with_a_control_text(text: str, size: int) -> None:
    parts = Cutter(CONTROLS, ATOMS, size).parts(text)
    assert "".join(parts) == text
    assert all(part.startswith(tuple(CONTROLS)) for part in parts[1:])
    assert all(len(part) >= size for part in parts[:-1])


def test_no_cut_inside_another_special_text() -> None:
    """Where "x<a" may be a token, the text is not divided before "<a>"."""
    assert Cutter(CONTROLS, ATOMS, 1).parts("yx<a>y<a>y") == ["yx<a>y", "<a>y"]
    assert Cutter([], ["x<a"], 1).parts("yx<a>") == ["yx<a>"]


def test_parts_have_the_tokens_of_the_whole_text() -> None:
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


MIB = 2**20
LOAD = """\
load_tensors: offloaded 33/33 layers to GPU
load_tensors:          CPU model buffer size =   281.81 MiB
load_tensors:        CUDA0 model buffer size =  4403.49 MiB
llama_context:  CUDA_Host  output buffer size =     0.49 MiB
llama_kv_cache:      CUDA0 KV buffer size =   512.00 MiB
llama_kv_cache:      CUDA0 KV buffer size =   128.00 MiB
sched_reserve:      CUDA0 compute buffer size =   900.00 MiB
sched_reserve:      CUDA0 compute buffer size =   258.50 MiB
sched_reserve:  CUDA_Host compute buffer size =    16.01 MiB
load_tensors: RPC0[127.0.0.1:5000] model buffer size = 10.00 MiB
"""


def test_buffers_are_read_per_device_and_kind() -> None:
    """KV caches are added; a compute buffer that is reserved again replaces the first."""
    tail = LogTail(lambda line: None)
    for line in LOAD.splitlines():
        tail.feed(2, line + "\n")
    names = {"CUDA0": "gpu-0", "RPC0": "sim-1"}
    assert {(found.device, found.kind): round(found.bytes / MIB, 2) for found in tail.buffers(names)} == {
        ("gpu-0", "weights"): 4403.49,
        ("gpu-0", "kv"): 640.0,
        ("gpu-0", "compute"): 258.5,
        ("sim-1", "weights"): 10.0,
        ("cpu", "weights"): 281.81,
        ("cpu", "compute"): 16.01,
        ("cpu", "other"): 0.49,
    }


def test_last_lines_are_kept_and_errors_are_echoed() -> None:
    echoed: list[str] = []
    tail = LogTail(echoed.append)
    tail.feed(1, "debugging is not kept\n")
    for number in range(100):
        tail.feed(2, f"line {number}\n")
    tail.feed(4, "CUDA error: out of ")
    tail.feed(5, "memory\n")
    assert len(tail.lines) == KEPT_LINES
    assert tail.lines[-1] == "CUDA error: out of memory"
    assert echoed == ["CUDA error: out of memory"]
    assert tail.complaints() == "CUDA error: out of memory"
