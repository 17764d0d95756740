"""Counts the processor cores this process may really compute on; decides no placement."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path


@functools.cache
def usable_cores() -> int:
    """Physical cores within the affinity mask and the cgroup quota, at least 1.

    llama.cpp's own default of 4 threads spins against itself on two cores, and hyper-threads add nothing to a matrix
    product.
    """
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = {_siblings(cpu) for cpu in allowed}
    count = len(siblings) if None not in siblings else len(allowed)
    return max(1, min(count, _quota()))


def _siblings(cpu: int) -> str | None:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return None


def _quota() -> int:
    """Whole cores the cgroup (v2) allows; a large number where it sets no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return 1 << 16 if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return 1 << 16
