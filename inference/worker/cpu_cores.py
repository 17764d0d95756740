"""Counts the CPU cores that this process may use, and measures idle and lost cores."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

LEAST_SECONDS = 0.2
"""Minimum duration of a measurement: the kernel counts idle time in hundredths of a second."""
GAP_SECONDS = 0.005
"""Maximum gap between consecutive steps. After a longer gap cores were idle because there was no work."""


@functools.cache
def usable_cores() -> int:
    """Physical cores within the affinity mask and the cgroup quota, at least 1.

    With the default of llama.cpp, 4 threads compete for two cores. Hyper-threads do not make matrix products faster.
    """
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = {_siblings(cpu) for cpu in allowed}
    count = len(siblings) if None not in siblings else len(allowed)
    return max(1, min(count, _quota()))


def idle_seconds() -> Mapping[int, float] | None:
    """Idle seconds of each CPU within the affinity mask, counted from an arbitrary start.

    None if the kernel does not report them. Source: `/proc/stat`, sum of the fourth field (idle) and fifth (I/O wait).
    """
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        tick = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    fields = (line.split() for line in lines if line.startswith("cpu") and not line.startswith("cpu "))
    seconds = {int(name.removeprefix("cpu")): (int(times[3]) + int(times[4])) / tick for name, *times in fields}
    return {cpu: seconds[cpu] for cpu in os.sched_getaffinity(0) if cpu in seconds}


def waited_seconds() -> float | None:
    """Seconds in which the calling thread was runnable and had no core.

    None if the kernel does not report them. Source: second field of `/proc/thread-self/schedstat`, in nanoseconds.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


class LostCores:
    """Measures the share of its computing time in which a thread waited for a core. Use it on that thread.

    `read` returns the seconds that the thread has waited.
    """

    def __init__(self, read: Callable[[], float | None] = waited_seconds) -> None:
        self._read = read
        self._computed = 0.0
        self._before: float | None = None

    def computed(self, seconds: float) -> None:
        """Adds computing time, including the time of waiting."""
        if self._before is None:
            self._before = self._read()  # the time before is unknown
        else:
            self._computed += seconds

    def share(self) -> float | None:
        """Share of the computing time since the last call of `forget`; None if it is unknown."""
        now = self._read()
        if now is None or self._before is None or self._computed <= 0:
            return None
        return (now - self._before) / self._computed

    def forget(self) -> None:
        """Starts a new measurement with the next step."""
        self._computed, self._before = 0.0, None


class IdleCores:
    """Measures idle physical cores during computing. `read` returns the idle seconds per CPU."""

    def __init__(self, read: Callable[[], Mapping[int, float] | None] = idle_seconds) -> None:
        self._read = read
        self._since = self._last = -math.inf
        self._before: Mapping[int, float] | None = None

    def over(self, began: float, ended: float) -> float | None:
        """After a step: average number of idle cores over the last consecutive steps; None if they were too short."""
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
    """Cores that the cgroup (v2) allows, rounded up; a large number without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return 1 << 16 if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return 1 << 16
