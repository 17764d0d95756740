"""Counts how often the kernel killed a process because host memory ran out; never says which process, kills none.

A worker that the kernel's out-of-memory killer ended looks like one that somebody killed from outside. The counters of
the control group that it ran in tell them apart: `oom_kill` in `memory.events` (v2) or `memory.oom_control` (v1), which
rise before the signal is sent, and where there are none, that of the whole machine in `/proc/vmstat`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

LATELY_SECONDS = 5.0
"""A death within this of a rise is laid to it."""


class HostKills:
    """The counter as it was seen last; times are seconds of one clock."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._files = [path for path in _files(root) if _count(path) is not None][:1]
        self._seen = self._read()
        self._rose_at = -math.inf

    def look(self, now: float) -> None:
        """Takes the counter as it is now; cheap, and to be called often."""
        count = self._read()
        if count is not None and self._seen is not None and count > self._seen:
            self._rose_at = now
        self._seen = count

    def lately(self, now: float) -> bool:
        """Whether it rose just now."""
        self.look(now)
        return now - self._rose_at <= LATELY_SECONDS

    def _read(self) -> int | None:
        return _count(self._files[0]) if self._files else None


def _files(root: Path) -> Iterator[Path]:
    """Where a counter may be, the nearest to this process first."""
    try:
        memberships = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        memberships = []
    for line in memberships:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base = root / "sys/fs/cgroup"
            yield from (base / path.lstrip("/") / "memory.events", base / "memory.events")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            yield from (base / path.lstrip("/") / "memory.oom_control", base / "memory.oom_control")
    yield root / "proc/vmstat"


def _count(path: Path) -> int | None:
    try:
        pairs = (line.split() for line in path.read_text(encoding="ascii").splitlines())
        return next((int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == "oom_kill"), None)
    except (OSError, ValueError):
        return None
