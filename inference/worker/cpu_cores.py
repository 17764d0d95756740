"""Counts the CPU cores that this process may use."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path


@functools.cache
def usable_cores() -> int:
    """Physical cores within the affinity mask and the cgroup quota, at least 1.

    llama.cpp's default is 4 threads even on two cores, which then compete. Hyper-threads do not make matrix products
    faster.
    """
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_siblings(cpu) for cpu in allowed}
    count = len(cores) if None not in cores else len(allowed)
    return max(1, min(count, _quota()))


@functools.cache
def _siblings(cpu: int) -> str | None:
    """The hyper-threads of the core of `cpu`, None if the kernel does not report them."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return None


def _quota() -> int:
    """Cores that the cgroup (v2) allows, rounded up; a large number without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return 1 << 16 if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return 1 << 16
