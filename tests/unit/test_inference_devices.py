"""Host memory and cgroups, visible devices, allowances, the probe of ggml devices, device views and trials."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.authority.handlers.queries import device_view
from inference.authority.handlers.queries.device_view import candidates
from inference.devices import device_probe, ggml_job
from inference.devices.device import Reading, environment_of, narrowed, outer_set
from inference.devices.ggml_devices import GgmlProbe, Listing
from inference.devices.host import CpuProbe, cgroups, host_memory
from inference.devices.nvml_reader import canonical_pci
from inference.environment_settings import InferenceSettings
from inference.protocol import DeviceState
from inference.settings import ModelEntry, ModelSpec, _spec
from inference.workers.helper_client import HelperError

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


def test_host_without_cgroups_has_the_memory_of_the_machine(root: Path) -> None:
    assert host_memory(root) == (16 * GIB, 4 * GIB)
    (reading,) = CpuProbe(root).readings()
    found = (reading.id, reading.name, reading.total_bytes, reading.free_bytes)
    assert found == ("cpu", "Some CPU", 16 * GIB, 12 * GIB)
    assert reading.environment["CUDA_VISIBLE_DEVICES"] == ""


def test_limit_of_cgroup_v2_excludes_inactive_file_pages(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/pod/box\n")
    write(root, "sys/fs/cgroup/pod/box/memory.max", "max\n")
    write(root, "sys/fs/cgroup/pod/memory.max", f"{8 * GIB}\n")
    write(root, "sys/fs/cgroup/pod/memory.current", f"{5 * GIB}\n")
    write(root, "sys/fs/cgroup/pod/memory.stat", f"anon 1\ninactive_file {2 * GIB}\nactive_file 7\n")
    (reading,) = CpuProbe(root).readings()
    assert (reading.total_bytes, reading.used_bytes, reading.free_bytes) == (8 * GIB, 3 * GIB, 5 * GIB)


def test_limit_of_cgroup_v1_is_read(root: Path) -> None:
    write(root, "proc/self/cgroup", "5:memory:/box\n0::/\n")
    write(root, "sys/fs/cgroup/memory/box/memory.limit_in_bytes", f"{GIB}\n")
    write(root, "sys/fs/cgroup/memory/box/memory.usage_in_bytes", f"{GIB // 2}\n")
    write(root, "sys/fs/cgroup/memory/box/memory.stat", "total_inactive_file 0\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert [group.limit_bytes for group in cgroups(root)] == [GIB]


def group(root: Path, path: str, limit: int, used: int) -> None:
    write(root, f"sys/fs/cgroup/{path}/memory.max", f"{limit}\n")
    write(root, f"sys/fs/cgroup/{path}/memory.current", f"{used}\n")
    write(root, f"sys/fs/cgroup/{path}/memory.stat", "inactive_file 0\n")


@pytest.mark.parametrize(
    ("box", "pod", "total", "free"),
    [
        ((8 * GIB, GIB), (64 * GIB, 0), 8 * GIB, 7 * GIB),
        ((8 * GIB, GIB), (10 * GIB, 9 * GIB), 8 * GIB, GIB),  # other containers fill the pod
        ((14 * GIB, GIB), (64 * GIB, 0), 14 * GIB, 12 * GIB),  # the machine has no more
        ((8 * GIB, 9 * GIB), (64 * GIB, 0), 8 * GIB, 0),
    ],
)
def test_free_memory_is_the_minimum_of_all_levels(
    root: Path, box: tuple[int, int], pod: tuple[int, int], total: int, free: int
) -> None:
    write(root, "proc/self/cgroup", "0::/pod/box\n")
    group(root, "pod/box", *box)
    group(root, "pod", *pod)
    (reading,) = CpuProbe(root).readings()
    assert (reading.total_bytes, reading.free_bytes, reading.used_bytes) == (total, free, total - free)


def test_cgroup_of_a_container_is_found_at_the_root(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/../elsewhere\n")
    write(root, "sys/fs/cgroup/memory.max", f"{2 * GIB}\n")
    write(root, "sys/fs/cgroup/memory.current", "0\n")
    write(root, "sys/fs/cgroup/memory.stat", "inactive_file 0\n")
    assert [group.limit_bytes for group in cgroups(root)] == [2 * GIB]


@pytest.mark.parametrize(
    ("value", "allowed"),
    [(None, None), ("", []), ("0,2", ["0", "2"]), ("GPU-abc, 1", ["GPU-abc", "1"]), ("1,-1,0", ["1"]), ("none", [])],
)
def test_visible_devices_are_parsed_like_the_driver_does(value: str | None, allowed: list[str] | None) -> None:
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
def test_visible_device_of_a_worker_is_one_of_the_outer_set(
    outer: str | None, index: int, uuid: str | None, inner: str
) -> None:
    assert narrowed(outer, index, uuid) == inner


@pytest.mark.parametrize("text", ["00000000:01:00.0", "0000:01:00.0", "01:00.0", "0:1:0.0"])
def test_pci_addresses_are_normalized(text: str) -> None:
    assert canonical_pci(text) == "0:1:0.0"


def gpu(total: int) -> Reading:
    return Reading("gpu-0", "cuda", "card", total, total, 0)


@pytest.mark.parametrize(
    ("reading", "settings", "capacity", "budget"),
    [
        (gpu(24 * GIB), {}, int(24 * GIB * 0.9), int(24 * GIB * 0.9)),
        (gpu(24 * GIB), {"gpu_memory_max_percent": 1.0}, 24 * GIB - GIB // 2, 24 * GIB - GIB // 2),
        (gpu(4 * GIB), {"gpu_memory_max_percent": 1.0}, 4 * GIB - 4 * GIB // 20, 4 * GIB - 4 * GIB // 20),
        (gpu(24 * GIB), {"gpu_memory_limit_mb": 1024}, int(24 * GIB * 0.9), GIB),
        (gpu(0), {}, 16 * GIB, 16 * GIB),
        (gpu(0), {"memory_limit_gb": 3}, 3 * GIB, 3 * GIB),
        (Reading("cpu", "cpu", "x", 16 * GIB, 1, 1), {}, 16 * GIB - GIB // 2, 8 * GIB),
    ],
)
def test_allowance_of_a_device_follows_from_its_limits(
    reading: Reading, settings: dict[str, Any], capacity: int, budget: int
) -> None:
    assert device_view.allowance(reading, InferenceSettings.model_validate(settings)) == (capacity, budget)


async def test_probe_of_a_cpu_build_lists_no_accelerator() -> None:
    probe = GgmlProbe({})
    await probe.start()
    await probe.refresh()
    await probe.close()
    assert all(reading.id.startswith("gpu-") for reading in probe.readings())


def listed(backend: str, count: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"ggml_name": f"{backend}{n}", "backend": backend, "name": "card", "type": "gpu", "pci": f"0000:0{n + 1}:00.0",
         "total_bytes": 10, "free_bytes": 9, **more}
        for n in range(count)
    ]  # fmt: skip


def lister(items: list[dict[str, Any]]) -> Listing:
    async def listing() -> list[dict[str, Any]]:
        return [*items, {"type": "cpu", "backend": "CPU"}, {"type": "accel", "backend": "BLAS"}]

    return listing


def amd_files(root: Path, pci: str, *, used: int, unique_id: str = "0\n") -> None:
    folder = f"sys/bus/pci/devices/{pci}"
    write(root, f"{folder}/mem_info_vram_total", f"{16 * GIB}\n")
    write(root, f"{folder}/mem_info_vram_used", f"{used}\n")
    write(root, f"{folder}/unique_id", unique_id)


async def test_amd_devices_are_read_from_sysfs(root: Path) -> None:
    """Figures are read at each refresh; devices with unique ids are selected by them."""
    amd_files(root, "0000:01:00.0", used=GIB, unique_id="9b8c7d6e5f4a\n")
    amd_files(root, "0000:02:00.0", used=0, unique_id="1\n")
    probe = GgmlProbe({}, root=root, listing=lister(listed("ROCm", 2)))
    await probe.start()
    await probe.refresh()
    first, second = probe.readings()
    assert (first.total_bytes, first.used_bytes, first.free_bytes) == (16 * GIB, GIB, 15 * GIB)
    assert first.uuid == "GPU-00009b8c7d6e5f4a"
    assert first.environment == {"ROCR_VISIBLE_DEVICES": "GPU-00009b8c7d6e5f4a", "HIP_VISIBLE_DEVICES": "0"}
    assert second.environment == {"ROCR_VISIBLE_DEVICES": "GPU-0000000000000001", "HIP_VISIBLE_DEVICES": "0"}
    assert second.ggml_name == "ROCm0"
    amd_files(root, "0000:02:00.0", used=3 * GIB)
    await probe.refresh()
    assert probe.readings()[1].free_bytes == 13 * GIB


async def test_amd_devices_are_selected_by_index_if_one_has_no_uuid(root: Path) -> None:
    """A list of UUIDs would hide the device without one from a model on both."""
    amd_files(root, "0000:01:00.0", used=0, unique_id="9b8c7d6e5f4a\n")
    amd_files(root, "0000:02:00.0", used=0)
    probe = GgmlProbe({}, root=root, listing=lister(listed("ROCm", 2)))
    await probe.start()
    assert [reading.uuid for reading in probe.readings()] == [None, None]
    assert environment_of(probe.readings()) == {"HIP_VISIBLE_DEVICES": "0,1"}


@pytest.mark.parametrize(
    ("outer", "pinned"),
    [
        ({}, "1"),
        ({"HIP_VISIBLE_DEVICES": "2,3"}, "3"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-a,GPU-b"}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, "0"),
        ({"HIP_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "0"}, "5"),
    ],
)
async def test_indices_of_hip_are_relative_to_the_outer_set(root: Path, outer: dict[str, str], pinned: str) -> None:
    """An outer ROCR list is applied first; the CUDA variable is used if that of HIP is unset."""
    probe = GgmlProbe(outer, root=root, listing=lister(listed("ROCm", 2)))
    await probe.start()
    assert probe.readings()[1].environment == {"HIP_VISIBLE_DEVICES": pinned}


async def test_other_devices_are_read_by_the_probe_child(root: Path) -> None:
    """Vulkan devices are selected by index; integrated and Metal devices use host memory."""
    items = listed("Vulkan", 1) + listed("MTL", 1, pci=None) + listed("SYCL", 1, type="igpu")
    probe = GgmlProbe({}, root=root, listing=lister(items))
    await probe.start()
    assert [reading.unified for reading in probe.readings()] == [False, True, True]
    assert [dict(reading.environment) for reading in probe.readings()] == [{"GGML_VK_VISIBLE_DEVICES": "0"}, {}, {}]
    items[0]["free_bytes"] = 4
    await probe.refresh()
    assert (probe.readings()[0].free_bytes, probe.readings()[0].used_bytes) == (4, 6)


async def test_unreadable_devices_keep_their_figures_with_a_note(root: Path) -> None:
    items = listed("Vulkan", 2)
    probe = GgmlProbe({}, root=root, listing=lister(items))
    await probe.start()
    gone = items.pop()
    await probe.refresh()
    assert [reading.sign for reading in probe.readings()] == ["uncertain", "missing"]
    assert "lists 1 devices where there were 2" in probe.readings()[0].note
    assert probe.readings()[1].free_bytes == 9
    items.append(gone)
    await probe.refresh()
    assert {reading.sign for reading in probe.readings()} == {"healthy"}


async def test_failing_probe_finds_no_devices_at_start_and_makes_known_devices_uncertain(root: Path) -> None:
    answers: list[list[dict[str, Any]]] = [listed("Vulkan", 1)]

    async def listing() -> list[dict[str, Any]]:
        if not answers:
            raise HelperError("it died")
        return answers.pop()

    probe = GgmlProbe({}, root=root, listing=listing)
    await probe.start()
    await probe.refresh()
    assert (probe.readings()[0].sign, probe.readings()[0].note) == ("uncertain", "it died")
    empty = GgmlProbe({}, root=root, listing=listing)
    await empty.start()
    await empty.refresh()
    assert empty.readings() == ()


GPUS = tuple(Reading(f"gpu-{number}", "cuda", "H200", 1000, 1000, 0) for number in range(2))
HOST = Reading("cpu", "cpu", "EPYC", 1000, 1000, 0)


def model(settings: InferenceSettings | None = None, **fields: object) -> ModelSpec:
    entry = ModelEntry.model_validate({"path": "/models/x.gguf", **fields})
    return _spec("x", entry, settings or InferenceSettings())


def ids(spec: ModelSpec, *readings: Reading, settings: InferenceSettings | None = None) -> list[str]:
    return [reading.id for reading in candidates(spec, readings, settings or InferenceSettings())]


def test_device_of_the_model_overrides_that_of_the_service_and_the_planner() -> None:
    pinned = InferenceSettings(gpu_index=1)
    assert ids(model(), *GPUS, HOST) == ["gpu-0", "gpu-1"]
    assert ids(model(pinned), *GPUS, HOST, settings=pinned) == ["gpu-1"]
    assert ids(model(pinned, gpu_index=0), *GPUS, HOST, settings=pinned) == ["gpu-0"]


def test_cpu_is_a_possible_device_without_accelerators_or_on_request() -> None:
    assert ids(model(), HOST) == ["cpu"]
    assert ids(model(gpu_layers=0), *GPUS, HOST) == ["cpu"]
    forced = InferenceSettings(force_cpu_mode=True)
    assert ids(model(), *GPUS, HOST, settings=forced) == ["cpu"]
    assert ids(model(oom_policy="cpu"), *GPUS, HOST) == ["gpu-0", "gpu-1", "cpu"]


@pytest.mark.parametrize("state", [DeviceState.LOST, DeviceState.QUARANTINED])
def test_lost_accelerator_is_not_replaced_by_the_cpu(state: DeviceState) -> None:
    lost = [replace(gpu, state=state) for gpu in GPUS]
    assert ids(model(), *lost, HOST) == []
    assert ids(model(), lost[0], GPUS[1], HOST) == ["gpu-1"]


class PaperLibrary:
    """Functions of ggml with one device; those in `failing` return the given failure."""

    def __init__(self, **failing: int | None) -> None:
        self.failing = failing

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments: self.failing.get(name, 0 if name == "ggml_backend_graph_compute" else 1)


class WrongLibrary(PaperLibrary):
    """A device that computes one number wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices: list[Any] = []

    def ggml_backend_tensor_set(self, _tensor: int, data: int, _offset: int, size: int) -> None:
        kept = np.frombuffer(ctypes.string_at(data, size), dtype=np.float32).reshape(-1, ggml_job.LONG)
        self.matrices.append(kept)

    def ggml_backend_tensor_get(self, _tensor: int, data: int, _offset: int, size: int) -> None:
        left, right = self.matrices
        product = right @ left.T
        product[3, 5] += 1.0
        ctypes.memmove(data, product.ctypes.data, size)


@pytest.mark.parametrize(
    ("library", "answer"),
    [
        (PaperLibrary(ggml_backend_dev_init=None), {"error": "it cannot be opened"}),
        (PaperLibrary(ggml_backend_alloc_ctx_tensors=None), {"full": "it has no memory left"}),
        (PaperLibrary(ggml_backend_graph_compute=-1), {"error": "it does not compute (status -1)"}),
        (PaperLibrary(), {"error": "it computes 8192 of 8192 numbers wrong"}),
        (WrongLibrary(), {"error": "it computes 1 of 8192 numbers wrong"}),
    ],
    ids=["closed", "full", "refusing", "silent", "wrong"],
)
def test_failure_of_a_device_is_described(library: Any, answer: dict[str, str]) -> None:
    assert ggml_job.check_product(library, 1) == answer


@pytest.mark.parametrize(
    ("output", "passes"),
    [
        ("CUDA error: out of memory\n  current device: 0, in function ggml_backend_cuda_init\nggml-cuda.cu:95", True),
        ("CUDA error: unspecified launch failure\nggml-cuda.cu:95: CUDA error", False),
        ("", False),
    ],
    ids=["full", "broken", "silent"],
)
async def test_trial_that_ends_with_out_of_memory_is_no_failure_of_the_device(output: str, passes: bool) -> None:
    """Backends print the reason before they abort; models may fill a healthy device."""

    async def run(*_arguments: Any, **_more: Any) -> dict[str, Any]:
        raise HelperError("the trial helper ended with status -6", output)

    with contextlib.nullcontext() if passes else pytest.raises(HelperError):
        await device_probe.trial(Reading("gpu-0", "cuda", "card", 10, 0, 10), run=run)
