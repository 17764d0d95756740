"""Keeps the threads that compute a step off each other's core when they wake up; decides nothing about their number,
nor how they wait for each other.

Threads that have slept for some milliseconds may all wake up on one core of several that are idle, and stay there until
the kernel balances its load: in a virtual machine Linux takes a core that sleeps for one that the host took away
(`available_idle_cpu`, `vcpu_is_preempted`), and wakes a thread where its waker runs. As they wait for each other at
every operation, the first step after a rest took 25 ms longer, 35 instead of 10 for a prompt of 80 tokens of a model of
15 M parameters (docs/benchmarks.md). So while that step is computed the others may run anywhere but where the first one
runs.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from inference.worker.cores.openmp_spinning import Brake, Watch
from inference.worker.cores.thread_names import Namesakes

REST_SECONDS = 0.005
"""Threads that slept for less wake up where they were."""


class Companions:
    """Those that compute with the calling thread: threads of this process that have its name, if it has one of its own.

    Asked on that thread alone, in turn. None is moved where there is one core or the kernel is not Linux.
    """

    def __init__(self, brake: Brake | None = None) -> None:
        """`brake`: what keeps them from spinning while others want their cores."""
        self._others = Namesakes()
        self._watch = Watch(brake, self._others.waited)
        self._began = 0.0
        self._ended = -math.inf
        self._parted: dict[int, set[int]] = {}

    def begin(self, now: float) -> None:
        """A step begins, on a clock in seconds."""
        self._began = now
        if now - self._ended > REST_SECONDS:
            try:
                self._part()
            except (OSError, ValueError):  # one ended, or a kernel that has none of it: it computes all the same
                self._others.forget()

    def end(self, now: float) -> None:
        """The step is over: they may run where they might before."""
        self._ended = now
        for thread, cores in self._parted.items():
            _allow(thread, cores)
        self._parted = {}
        self._watch.computed(now - self._began, now)

    def _part(self) -> None:
        if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
            return
        here = _core()
        for thread in self._others.ids():
            cores = os.sched_getaffinity(thread)
            if here in cores and len(cores) > 1:
                self._parted[thread] = cores
                _allow(thread, cores - {here})


def _core() -> int:
    """Where the calling thread runs (proc_pid_stat(5): the 39th field, 36 behind the name)."""
    return int(Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[36])


def _allow(thread: int, cores: set[int]) -> None:
    with contextlib.suppress(OSError):  # it ended, or may not be told
        os.sched_setaffinity(thread, cores)
