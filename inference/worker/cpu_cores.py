"""Counts the processor cores this process may really compute on; decides no placement."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

LEAST_SECONDS = 0.2
"""The kernel counts idleness in hundredths of a second."""
GAP_SECONDS = 0.005
"""Between two steps in a row; after more, cores were idle because there was nothing to compute."""


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


def idle_seconds() -> Mapping[int, float] | None:
    """Seconds that each processor within the affinity mask had nothing to do, since some time in the past; None where
    the kernel does not tell (`/proc/stat`: idle and waiting for I/O are the fourth and fifth figure).
    """
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        tick = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    fields = (line.split() for line in lines if line.startswith("cpu") and not line.startswith("cpu "))
    seconds = {int(name.removeprefix("cpu")): (int(times[3]) + int(times[4])) / tick for name, *times in fields}
    return {cpu: seconds[cpu] for cpu in os.sched_getaffinity(0) if cpu in seconds}


def waited_seconds(thread: int | None = None) -> float | None:
    """Seconds that the calling thread, or that one of this process, was ready to run and had no core, since it began;
    None where the kernel does not tell (`/proc/thread-self/schedstat`: the second figure, in nanoseconds).
    """
    place = "thread-self" if thread is None else f"self/task/{thread}"
    try:
        return int(Path(f"/proc/{place}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


class LostCores:
    """How much of the time in which a thread computed it was without a core; asked on that thread. `read` gives the
    seconds that it waited for one.
    """

    def __init__(self, read: Callable[[], float | None] = waited_seconds) -> None:
        self._read = read
        self._computed = 0.0
        self._before: float | None = None

    def computed(self, seconds: float) -> None:
        """The thread computed for so long, waiting included."""
        if self._before is None:
            self._before = self._read()  # what it waited before that is not known
        else:
            self._computed += seconds

    def share(self) -> float | None:
        """Of what was computed since the last call of `forget`; None where nobody can tell."""
        now = self._read()
        if now is None or self._before is None or self._computed <= 0:
            return None
        return (now - self._before) / self._computed

    def forget(self) -> None:
        """Begins anew with the next step."""
        self._computed, self._before = 0.0, None


class IdleCores:
    """How many physical cores have nothing to do while something computes. `read` gives idle seconds per processor."""

    def __init__(self, read: Callable[[], Mapping[int, float] | None] = idle_seconds) -> None:
        self._read = read
        self._since = self._last = -math.inf
        self._before: Mapping[int, float] | None = None

    def over(self, began: float, ended: float) -> float | None:
        """After a step: idle cores on average over the last steps in a row, None where these were too short to tell."""
        if began - self._last > GAP_SECONDS:
            self._since, self._before = ended, self._read()
        self._last = ended
        if self._before is None or ended - self._since < LEAST_SECONDS:
            return None
        now, before, seconds = self._read() or {}, self._before, ended - self._since
        self._since, self._before = ended, now
        idle: dict[str, float] = {}
        for cpu in now.keys() & before.keys():
            core = _siblings(cpu) or str(cpu)
            idle[core] = min(idle.get(core, 1.0), (now[cpu] - before[cpu]) / seconds)
        return sum(idle.values())


@functools.cache
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
