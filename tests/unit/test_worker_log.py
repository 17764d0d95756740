"""The log of llama.cpp: allocated buffers, the last lines, and the lines that go to stderr."""

from __future__ import annotations

from inference.worker.llama.llama_log import KEPT_LINES, LogTail

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
    """Several KV caches add up, a compute buffer that is reserved again replaces the first."""
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


def test_the_last_lines_are_kept_and_complaints_are_echoed() -> None:
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
