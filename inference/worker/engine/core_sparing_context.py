"""A context on the CPU that leaves a core to other programs where steps are faster that way.

The kernel reports how long the thread waited for a core, and how many cores were idle.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from inference.worker.backend import OK, Backend, BatchRow, Decode
from inference.worker.cpu_cores import siblings
from inference.worker.engine.core_sparing import CoreSparing

DIVIDED_FROM = 256
"""Cells from which llama.cpp divides the attention of a single sequence over the threads. From here on the number of
threads changes how sums are rounded (ggml-cpu `ops.cpp`: one query and 512 cells or more, in blocks of 256)."""

LEAST_SECONDS = 0.2
"""Minimum duration of a measurement: the kernel counts idle time in hundredths of a second."""
GAP_SECONDS = 0.005
"""Maximum gap between consecutive steps. After a longer gap cores were idle because there was no work."""


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
            core = siblings(cpu) or str(cpu)
            idle[core] = min(idle.get(core, 1.0), (now[cpu] - before[cpu]) / seconds)
        return sum(idle.values())


class CoreSparingBackend:
    """A `Backend` that wraps another one and measures its decode steps.

    Prefill uses every thread. A single sequence of `DIVIDED_FROM` cells or more does too, because its results
    depend on the number of threads and must not depend on the load. `spare(n)` removes `n` threads from the next steps,
    down to one thread.
    """

    def __init__(
        self,
        backend: Backend,
        spare: Callable[[int], None],
        clock: Callable[[], float] = time.perf_counter,
        idle: IdleCores | None = None,
        lost: LostCores | None = None,
    ) -> None:
        self.can_trim = backend.can_trim
        self.remove = backend.remove
        self.copy = backend.copy
        self.save = backend.save
        self.restore = backend.restore
        self.logits = backend.logits
        self._backend = backend
        self._set_spared = spare
        self._clock = clock
        self._idle = idle or IdleCores()
        self._lost = lost or LostCores()
        self._sparing = CoreSparing()
        self._spared = 0

    def decode(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
        """Computes a step with the number of threads that the policy chose."""
        if any(len(row.tokens) != 1 for row in rows) or (len(rows) == 1 and rows[0].start >= DIVIDED_FROM):
            self._spare(0)
            began, ended, status, last = self._computed(rows)
            self._lost.computed(ended - began)
            return status, last
        sparing = self._sparing
        self._spare(sparing.spared)
        began, ended, status, last = self._computed(rows)
        if status is OK:
            self._lost.computed(ended - began)
            idle = self._idle.over(began, ended) if sparing.spared else None
            is_due = sparing.is_due
            sparing.observe(len(rows), ended - began, idle, self._lost.share() if is_due else None)
            if sparing.spared or (is_due and not sparing.is_due):
                self._lost.forget()  # measured with one thread fewer: not comparable
        return status, last

    def _computed(self, rows: Sequence[BatchRow]) -> tuple[float, float, Decode, list[int]]:
        """Returns the times of begin and end, the status, and the outputs of the step."""
        began = self._clock()
        status, last = self._backend.decode(rows)
        return began, self._clock(), status, last

    def _spare(self, count: int) -> None:
        if count != self._spared:
            self._spared = count
            self._set_spared(count)
