"""Host memory from files as kernels write them; which devices a process may see; allowances in bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference import views
from inference.devices.base import Reading, narrowed, outer_set
from inference.devices.cpu import CpuProbe, cgroups, host_memory
from inference.devices.ggml import GgmlProbe
from inference.devices.nvml import canonical_pci
from inference.environment import InferenceSettings

GIB = 2**30


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", "MemTotal:  16777216 kB\nMemFree: 100 kB\nMemAvailable: 12582912 kB\n")
    write(tmp_path, "proc/cpuinfo", "processor : 0\nmodel name : Some CPU\n")
    return tmp_path


def test_a_machine_without_cgroups(root: Path) -> None:
    assert host_memory(root) == (16 * GIB, 4 * GIB)
    (reading,) = CpuProbe(root).readings()
    assert (reading.id, reading.name, reading.total_bytes, reading.free_bytes) == (
        "cpu",
        "Some CPU",
        16 * GIB,
        12 * GIB,
    )
    assert reading.environment["CUDA_VISIBLE_DEVICES"] == ""


def test_a_cgroup_v2_limit_counts_without_inactive_file_pages(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/pod/box\n")
    write(root, "sys/fs/cgroup/pod/box/memory.max", "max\n")
    write(root, "sys/fs/cgroup/pod/memory.max", f"{8 * GIB}\n")
    write(root, "sys/fs/cgroup/pod/memory.current", f"{5 * GIB}\n")
    write(root, "sys/fs/cgroup/pod/memory.stat", f"anon 1\ninactive_file {2 * GIB}\nactive_file 7\n")
    (reading,) = CpuProbe(root).readings()
    assert (reading.total_bytes, reading.used_bytes, reading.free_bytes) == (8 * GIB, 3 * GIB, 5 * GIB)


def test_a_cgroup_v1_limit_counts_too_and_no_limit_is_none(root: Path) -> None:
    write(root, "proc/self/cgroup", "5:memory:/box\n0::/\n")
    write(root, "sys/fs/cgroup/memory/box/memory.limit_in_bytes", f"{GIB}\n")
    write(root, "sys/fs/cgroup/memory/box/memory.usage_in_bytes", f"{GIB // 2}\n")
    write(root, "sys/fs/cgroup/memory/box/memory.stat", "total_inactive_file 0\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert [group.limit_bytes for group in cgroups(root)] == [GIB]


def test_a_container_that_sees_only_its_own_group_finds_it(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/../elsewhere\n")
    write(root, "sys/fs/cgroup/memory.max", f"{2 * GIB}\n")
    write(root, "sys/fs/cgroup/memory.current", "0\n")
    write(root, "sys/fs/cgroup/memory.stat", "inactive_file 0\n")
    assert [group.limit_bytes for group in cgroups(root)] == [2 * GIB]


@pytest.mark.parametrize(
    ("value", "allowed"),
    [(None, None), ("", []), ("0,2", ["0", "2"]), ("GPU-abc, 1", ["GPU-abc", "1"]), ("1,-1,0", ["1"]), ("none", [])],
)
def test_visible_devices_are_read_as_the_driver_reads_them(value: str | None, allowed: list[str] | None) -> None:
    assert outer_set(value) == allowed


@pytest.mark.parametrize(
    ("outer", "index", "uuid", "inner"),
    [
        (None, 1, "GPU-b", "GPU-b"),
        (None, 1, None, "1"),
        ("2,3", 1, "GPU-d", "3"),
        ("GPU-x", 0, "GPU-y", "GPU-x"),
        ("2", 1, None, ""),
    ],
)
def test_a_worker_is_narrowed_within_what_was_set_from_outside(
    outer: str | None, index: int, uuid: str | None, inner: str
) -> None:
    assert narrowed(outer, index, uuid) == inner


@pytest.mark.parametrize("text", ["00000000:01:00.0", "0000:01:00.0", "01:00.0", "0:1:0.0"])
def test_pci_addresses_are_one_in_every_spelling(text: str) -> None:
    assert canonical_pci(text) == "0:1:0.0"


def gpu(total: int) -> Reading:
    return Reading("gpu-0", "cuda", "card", total, total, 0)


@pytest.mark.parametrize(
    ("reading", "said", "capacity", "budget"),
    [
        (gpu(24 * GIB), {}, int(24 * GIB * 0.9), int(24 * GIB * 0.9)),
        (gpu(24 * GIB), {"gpu_memory_max_percent": 1.0}, 24 * GIB - GIB // 2, 24 * GIB - GIB // 2),
        (gpu(4 * GIB), {"gpu_memory_max_percent": 1.0}, 4 * GIB - 4 * GIB // 20, 4 * GIB - 4 * GIB // 20),
        (gpu(24 * GIB), {"gpu_memory_limit_mb": 1024}, GIB, GIB),
        (gpu(0), {}, 16 * GIB, 16 * GIB),
        (gpu(0), {"memory_limit_gb": 3}, 3 * GIB, 3 * GIB),
        (Reading("cpu", "cpu", "x", 16 * GIB, 1, 1), {}, 16 * GIB - GIB // 2, 8 * GIB),
    ],
)
def test_allowances(reading: Reading, said: dict[str, Any], capacity: int, budget: int) -> None:
    assert views.allowance(reading, InferenceSettings.model_validate(said)) == (capacity, budget)


async def test_a_machine_without_accelerators_has_none() -> None:
    """The real probe child of a CPU build lists nothing but the CPU, and that is no error."""
    probe = GgmlProbe({})
    await probe.start()
    await probe.refresh()
    await probe.close()
    assert all(reading.id.startswith("gpu-") for reading in probe.readings())


async def test_probed_devices_are_named_pinned_and_measured_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cards behind CUDA_VISIBLE_DEVICES: our order is llama.cpp's, figures and UUIDs are NVML's."""
    listed = [
        {"ggml_name": f"CUDA{n}", "backend": "CUDA", "name": "card", "type": "gpu", "pci": f"0000:0{n + 1}:00.0",
         "total_bytes": 10, "free_bytes": 9}
        for n in range(2)
    ]  # fmt: skip
    figures = {
        f"0:{n + 1}:0.0": {
            "uuid": f"GPU-{n}",
            "name": f"Card {n}",
            "total_bytes": 100,
            "free_bytes": 60,
            "used_bytes": 40,
        }
        for n in range(2)
    }

    async def devices(*_: Any, **__: Any) -> dict[str, Any]:
        return {"devices": [*listed, {"type": "cpu", "backend": "CPU"}]}

    async def read(_: Any) -> Any:
        return figures

    monkeypatch.setattr("inference.devices.ggml.run_helper", devices)
    monkeypatch.setattr("inference.devices.nvml.NvmlReader.read", read)
    probe = GgmlProbe({})
    await probe.start()
    first, second = probe.readings()
    assert (first.id, first.uuid, first.free_bytes, first.ggml_name) == ("gpu-0", "GPU-0", 60, "CUDA0")
    assert second.environment == {"CUDA_VISIBLE_DEVICES": "GPU-1"}
    assert second.ggml_name == "CUDA0"
    figures["0:2:0.0"]["free_bytes"] = 10
    await probe.refresh()
    assert probe.readings()[1].free_bytes == 10
    outer = GgmlProbe({"CUDA_VISIBLE_DEVICES": "5,7"})
    await outer.start()
    assert outer.readings()[1].environment == {"CUDA_VISIBLE_DEVICES": "7"}
