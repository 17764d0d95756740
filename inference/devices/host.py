"""Measures host memory within the limits of control groups.

Used memory excludes what the kernel can drop: current minus inactive file pages of a group, total minus available of
the machine. The total is the smallest limit. Free memory is the smallest remainder of all levels including the machine,
because other processes share them.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inference.devices.device import CPU, HIDDEN, Reading
from inference.devices.device_probe import Probe
from inference.workers.os_api import cgroup_folders

_NO_LIMIT = 2**62


class CpuProbe(Probe):
    """Host RAM as the device `cpu`. Each call reads a few small files."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._name = _cpu_name(root)

    def readings(self) -> tuple[Reading, ...]:
        """The current host memory; always up to date, so that there is nothing to refresh."""
        total, used = host_memory(self._root)
        free = total - used
        for group in cgroups(self._root):
            total = min(total, group.limit_bytes)
            free = min(free, max(0, group.limit_bytes - group.used_bytes))
        return (
            Reading(
                id=CPU,
                kind="cpu",
                name=self._name,
                total_bytes=total,
                free_bytes=free,
                used_bytes=total - free,
                environment=HIDDEN,
            ),
        )


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(total, used) bytes of the machine; 0 for what cannot be read."""
    try:
        fields = dict(_pairs((root / "proc/meminfo").read_text(encoding="ascii")))
        return fields["MemTotal"], fields["MemTotal"] - fields["MemAvailable"]
    except (OSError, KeyError, ValueError):
        return _without_proc()


def _pairs(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        value = rest.split()
        if value:
            yield name, int(value[0]) * 1024


def _without_proc() -> tuple[int, int]:
    """macOS: the physical memory from sysconf, free and inactive pages from `vm_stat`."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0, 0
    if sys.platform != "darwin":
        return total, 0
    try:
        output = subprocess.run(["vm_stat"], capture_output=True, text=True, timeout=2, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return total, 0
    pages = 0
    for line in output.splitlines():
        name, _, value = line.partition(":")
        if name in ("Pages free", "Pages inactive", "Pages speculative", "Pages purgeable"):
            pages += int(value.strip().rstrip("."))
    return total, max(0, total - pages * page)


@dataclass(frozen=True, slots=True)
class Group:
    """A control group that limits this process. `used_bytes` excludes pages that the kernel can drop."""

    limit_bytes: int
    used_bytes: int


def cgroups(root: Path = Path("/")) -> Iterator[Group]:
    """The memory control groups (v2 and v1) with a limit, from this process up to the root."""
    for base, here, is_v2 in cgroup_folders(root):
        for folder in [here, *here.parents] if here.is_dir() else [base]:
            with contextlib.suppress(OSError, ValueError):  # no limit at this level, or not readable
                yield from _limits(folder, *(_V2_FILES if is_v2 else _V1_FILES))
            if folder == base:
                break


_V2_FILES = ("memory.max", "memory.current", "inactive_file")
_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _limits(folder: Path, limit_name: str, used_name: str, inactive: str) -> Iterator[Group]:
    """The group in `folder` if it has a limit. `inactive` is the name of inactive file pages in `memory.stat`."""
    text = (folder / limit_name).read_text(encoding="ascii").strip()
    if text != "max" and int(text) < _NO_LIMIT:
        used = int((folder / used_name).read_text(encoding="ascii"))
        lines = (line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        file_pages = next((int(value) for name, value in lines if name == inactive), 0)
        yield Group(int(text), max(0, used - file_pages))


def _cpu_name(root: Path) -> str:
    try:
        for line in (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor() or platform.machine()
    return platform.machine()
