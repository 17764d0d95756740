"""Checks of the machine: accelerators and their drivers against the build, the CPU, memory limits, process limits."""

from __future__ import annotations

import asyncio
import os
import re
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headgate.build import Cpu, this_cpu
from headgate.cli.doctor.findings import Finding, note, ok, problem, warning
from headgate.engine_build import missing_backends
from headgate.shared.units import MIB, format_bytes
from inference.devices.build_check import ADVICE, START_SECONDS
from inference.devices.device import CPU
from inference.devices.host import CpuProbe, cgroups, host_memory
from inference.devices.inventory import Inventory
from inference.devices.nvml_reader import Card, NvmlReader
from inference.devices.signs import Sign
from inference.devices.simgpu.rpc_server import package
from inference.environment_settings import InferenceSettings
from inference.workers.helper_client import HelperError, run_helper
from inference.workers.os_api import cgroup_folders

BACKENDS = ("cuda", "hip", "vulkan", "sycl", "musa", "cann", "opencl", "metal")
MIN_MEMORY_BYTES = 512 * MIB
MIN_FILES = 4096
MIN_PROCESSES = 200

_INSTRUCTIONS: Mapping[str, str] = {
    "avx": "AVX",
    "f16c": "F16C",
    "fma": "FMA",
    "avx2": "AVX2",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "amx_int8": "AMX_INT8",
    "asimddp": "DOTPROD",
    "i8mm": "MATMUL_INT8",
    "sve": "SVE",
}
"""Features of a CPU as Linux names them, and the names in `llama_print_system_info`."""


@dataclass(frozen=True)
class Vendor:
    """A maker of accelerators, and llama.cpp's backends for them."""

    name: str
    pci: str
    """The vendor's id on the PCI bus."""
    backends: tuple[str, ...]
    driver: str
    """A path that exists when the driver is loaded, relative to the root."""
    files: str
    """A pattern for the device files in /dev."""
    install: str
    """How to install the driver."""


NVIDIA = Vendor(
    "NVIDIA",
    "0x10de",
    ("cuda", "vulkan"),
    "proc/driver/nvidia/version",
    "nvidia[0-9]*",
    "install the driver of the distribution (nvidia-smi then lists the GPU); in a container start it with `--gpus all` "
    "and the NVIDIA container toolkit",
)
AMD = Vendor(
    "AMD",
    "0x1002",
    ("hip", "vulkan"),
    "dev/kfd",
    "kfd",
    "load the kernel module amdgpu; in a container pass `--device /dev/kfd --device /dev/dri`",
)


def build() -> Iterator[Finding]:
    """llama.cpp: installed, computes here, and uses the instructions of the CPU."""
    folder = package()
    if folder is None:
        yield problem("llama.cpp", "llama-cpp-python is not installed", "in a clone: `make serve` compiles it")
        return
    try:
        answer = asyncio.run(run_helper("proof", {}, seconds=START_SECONDS))
    except HelperError as error:
        answer = {"error": str(error)}
    if "error" in answer:
        yield problem("llama.cpp", f"the build does not compute on this CPU: {answer['error']}", ADVICE)
        return
    cpu = this_cpu()
    yield ok("llama.cpp", f"computes on {cpu}")
    yield instructions(cpu, answer["system_info"])


def instructions(cpu: Cpu, system_info: str) -> Finding:
    """The instruction sets of the CPU that the build does not use; `system_info` is from llama.cpp."""
    used = set(re.findall(r"(\w+) = 1", system_info))
    unused = [name for feature, name in _INSTRUCTIONS.items() if cpu.has([feature]) and name not in used]
    if not unused:
        return ok("instructions", "the build uses the vector instructions of this CPU")
    return warning(
        "instructions",
        f"the build does not use {', '.join(unused)} of this CPU, so that models on the CPU are slower",
        "compile llama.cpp on this machine: `make clean`, then `make serve`; in a container image for every "
        "x86-64 CPU, llama.cpp chooses the instructions at run time, and this warning may not apply",
    )


def accelerators(built: set[str], settings: InferenceSettings, root: Path = Path("/")) -> Iterator[Finding]:
    """Accelerators of the machine against the backends in the build, drivers and device files."""
    names = ", ".join(sorted(built)) or "none, CPU only"
    yield ok("backends", f"llama.cpp is built with: {names}")
    if settings.force_cpu_mode or settings.devices == "cpu":
        yield note("devices", "INFERENCE_DEVICES or INFERENCE_FORCE_CPU_MODE restricts the service to the CPU")
        return
    for vendor in (NVIDIA, AMD):
        yield from _vendor(vendor, built, root)


def _vendor(vendor: Vendor, built: set[str], root: Path) -> Iterator[Finding]:
    count, driver = _cards(vendor, root), root / vendor.driver
    if not count and not driver.exists():
        return
    if not driver.exists():
        yield warning("driver", f"{count} {vendor.name} GPU{'s' if count > 1 else ''} without a driver", vendor.install)
        return
    version = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", _text(driver)) if driver.is_file() else None
    yield ok("driver", f"{vendor.name}{f' {version[1]}' if version else ''}")
    if not built & set(vendor.backends):
        flag = {"cuda": "CUDA", "hip": "HIP"}[vendor.backends[0]]
        yield warning(
            "backends",
            f"this machine has a {vendor.name} GPU, and llama.cpp is built without {' or '.join(vendor.backends)}",
            f'compile it once with the toolkit installed: CMAKE_ARGS="-DGGML_{flag}=ON" make serve',
        )
    files = sorted((root / "dev").glob(vendor.files))
    if vendor is AMD:
        files += sorted((root / "dev/dri").glob("renderD*"))
    if not files:
        yield problem("device files", f"this system or container has no {root / 'dev' / vendor.files}", vendor.install)
    for path in files:
        if not os.access(path, os.R_OK | os.W_OK):
            yield problem(
                "device files",
                f"{path} is not accessible for this user",
                "add the user to its group (often `render` or `video`): sudo usermod -aG render,video $USER; then log "
                "in again",
            )


def _cards(vendor: Vendor, root: Path) -> int:
    """The number of display controllers and 3D controllers of a vendor on the PCI bus."""
    folders = (root / "sys/bus/pci/devices").glob("*")
    return sum(
        _text(folder / "vendor").strip() == vendor.pci and _text(folder / "class").startswith(("0x0300", "0x0302"))
        for folder in folders
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def built_backends() -> set[str]:
    """The backends in the installed build; none when llama.cpp is not installed."""
    folder = package()
    return set() if folder is None else set(BACKENDS) - set(missing_backends(folder, BACKENDS))


def nvml(root: Path = Path("/")) -> Iterator[Finding]:
    """NVML, the library from which the inference service reads memory and health of NVIDIA GPUs."""

    async def read() -> tuple[NvmlReader, list[Card]]:
        reader = NvmlReader()
        try:
            return reader, list((await reader.read()).values())
        finally:
            await reader.close()

    reader, cards = asyncio.run(read())
    failures = [reader.error] if reader.error is not None else list(reader.unread)
    failures += [f"{card.name}: {card.note}" for card in cards if card.sign is not Sign.HEALTHY]
    for text in failures:
        advice = "restart the machine after an update of the driver; `dmesg | grep -i xid` shows faults of the GPU"
        yield problem("NVML", text, advice)
    if cards:
        yield ok("NVML", f"reads {', '.join(f'{card.name} ({format_bytes(card.total_bytes)})' for card in cards)}")
    elif not failures and (root / NVIDIA.driver).exists():
        yield warning(
            "NVML",
            "libnvidia-ml.so is not found, so that memory of other programs and health of the GPU are unknown",
            "install the library of the driver; in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )


def devices(settings: InferenceSettings) -> Iterator[Finding]:
    """The accelerators that the service would use with INFERENCE_DEVICES=auto; nothing if it is set otherwise."""

    async def measure() -> list[str]:
        inventory = Inventory.of(settings.model_copy(update={"devices": "auto"}))
        try:
            await inventory.start()
            return [
                f"{each.id} {each.name}, {format_bytes(each.free_bytes)} of {format_bytes(each.total_bytes)} free"
                + (f" ({each.note})" if each.note else "")
                for each in inventory.measured()
                if each.id != CPU
            ]
        finally:
            await inventory.close()

    if settings.force_cpu_mode or settings.devices == "cpu" or settings.simulated_bytes:
        return
    try:
        found = asyncio.run(measure())
    except HelperError as error:
        yield problem("devices", f"llama.cpp cannot list devices: {error}", "check the driver; compile it again")
        return
    yield ok("devices", "; ".join(found)) if found else note("devices", "no accelerator; models run on the CPU")


def memory(settings: InferenceSettings, root: Path = Path("/")) -> Iterator[Finding]:
    """Host memory, limits of control groups, and what models may use of it."""
    total, _ = host_memory(root)
    reading = CpuProbe(root).readings()[0]
    limit = min((group.limit_bytes for group in cgroups(root)), default=total)
    share = int(reading.total_bytes * settings.cpu_memory_max_percent)  # from 0 to 1
    usable = min(share, reading.free_bytes)
    text = (
        f"{format_bytes(total)}, {format_bytes(reading.free_bytes)} free; models on the CPU may take "
        f"{format_bytes(usable)}"
    )
    if limit < total:
        text += f"; the control group of this container or service allows {format_bytes(limit)}"
    if usable < MIN_MEMORY_BYTES:
        yield problem(
            "memory",
            text,
            "free memory, raise the limit (`docker run --memory`, `MemoryMax=` of systemd), or raise "
            "INFERENCE_CPU_MEMORY_MAX_PERCENT",
        )
    elif limit < total:
        yield note("memory", text, "raise the limit for larger models: `docker run --memory`, `MemoryMax=` of systemd")
    else:
        yield ok("memory", text)


def limits(root: Path = Path("/")) -> Iterator[Finding]:
    """Open files and processes that this process may have."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < MIN_FILES:
        advice = "raise the limit with `ulimit -n 65536`, so that the gateway can keep more connections open"
        yield note("open files", f"limited to {files}", advice)
    for base, here, _is_v2 in cgroup_folders(root):
        for folder in [here, *here.parents]:
            text = _text(folder / "pids.max").strip()
            if text.isdigit() and int(text) < MIN_PROCESSES:
                yield warning(
                    "processes",
                    f"the control group allows {text} processes and threads",
                    f"allow {MIN_PROCESSES} or more: `docker run --pids-limit`, `TasksMax=` of systemd",
                )
                return
            if folder == base:
                break
