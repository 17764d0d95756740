"""Sizes of buffers that several devices share: one figure of llama.cpp becomes the bytes of each device."""

from __future__ import annotations

import pytest

from inference.errors import MemoryLimitExceededError
from inference.worker.llama.llama_process import LogTail
from inference.worker.llama.split_modes import Division, log_parts
from inference.worker_link import Buffer

MIB = 2**20
DIVISION = Division((300, 100), ((0.75, 0.25), (0.5, 0.5), (1.0, 1.0), (0.0, 0.0)))
"""Two layers with divided caches, one with a cache on both devices, one in host memory."""


def test_caches_are_divided_by_layer() -> None:
    assert DIVISION.cache_bytes(600, [100, 200, 300, 999]) == [475, 425]
    assert DIVISION.cache_bytes(0, [0, 0, 0, 0]) == [0, 0]


def test_buffer_of_all_devices_counts_on_each_with_its_part() -> None:
    """The log has the largest part in mode tensor, the sum in mode row."""
    names = {"CUDA0": "gpu-0", "CUDA1": "gpu-1"}
    tail = LogTail(lambda _line: None)
    tail.feed(2, "load_tensors: Meta(CUDA0,CUDA1) model buffer size = 3.00 MiB\n")
    tail.feed(2, "llama_kv_cache: Meta(CUDA0,CUDA1) KV buffer size = 9.00 MiB\n")
    tail.feed(2, "sched_reserve: Meta(CUDA0,CUDA1) compute buffer size = 2.00 MiB\n")
    tail.feed(2, "sched_reserve: CPU compute buffer size = 1.00 MiB\n")
    assert tail.buffers(names, DIVISION.of_largest()) == (
        Buffer("cpu", "compute", MIB),
        Buffer("gpu-0", "compute", 2 * MIB),
        Buffer("gpu-0", "kv", 9 * MIB),
        Buffer("gpu-0", "weights", 3 * MIB),
        Buffer("gpu-1", "compute", 2 * MIB),
        Buffer("gpu-1", "kv", 7 * MIB),
        Buffer("gpu-1", "weights", MIB),
    )
    rows = LogTail(lambda _line: None)
    rows.feed(2, "load_tensors: SYCL_Split model buffer size = 4.00 MiB\n")
    rows.feed(2, "load_tensors: CUDA1 model buffer size = 1.00 MiB\n")
    found = rows.buffers(names, log_parts("row", (3.0, 1.0), None))
    assert found == (Buffer("gpu-0", "weights", 3 * MIB), Buffer("gpu-1", "weights", 2 * MIB))


@pytest.mark.parametrize("mode", ["layer", "row", "tensor"])
def test_mode_makes_no_difference_on_one_device(mode: str) -> None:
    assert log_parts(mode, (), None) == {}


@pytest.mark.parametrize("undivided", ["", "split_mode row needs split buffers; set split_mode: layer"])
def test_refusal_has_the_reason_why_several_devices_do_not_share_the_model(undivided: str) -> None:
    message = MemoryLimitExceededError("m", (), reason="it is too large", undivided=undivided).message
    assert message.endswith(f"several devices cannot share it: {undivided}" if undivided else "it is too large")
