"""Watches the kernel's counter of out-of-memory kills.

The signal alone does not show whether the out-of-memory killer or another process ended a worker. The counter
`oom_kill` does, because it rises before the signal is sent: in `memory.events` (control groups v2) or
`memory.oom_control` (v1) of the group, else in `/proc/vmstat` for the whole machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

LATELY_SECONDS = 5.0
"""An exit within this time after a rise is attributed to it."""


class KernelOomKills:
    """The counter and the time of its last rise. Times are seconds of one clock."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._files = [path for path in _files(root) if _count(path) is not None][:1]
        self._seen = self._read()
        self._rose_at = -math.inf

    def update(self, now: float) -> None:
        """Reads the counter. Must be called often; it is cheap."""
        count = self._read()
        if count is not None and self._seen is not None and count > self._seen:
            self._rose_at = now
        self._seen = count

    def is_recent(self, now: float) -> bool:
        """Whether the counter rose within LATELY_SECONDS."""
        self.update(now)
        return now - self._rose_at <= LATELY_SECONDS

    def _read(self) -> int | None:
        return _count(self._files[0]) if self._files else None


def _files(root: Path) -> Iterator[Path]:
    """Files that may contain the counter, the group of this process first."""
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
