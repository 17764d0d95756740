"""Names threads and finds those of a name; starts none, and decides nothing about them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from inference.worker.cpu_cores import waited_seconds

_TASKS = Path("/proc/self/task")


def name_thread(name: str) -> None:
    """Names the calling thread, as its companions will be that OpenMP makes for it; up to 15 bytes on Linux, elsewhere
    nothing.
    """
    with contextlib.suppress(OSError):
        Path("/proc/thread-self/comm").write_text(name)


class Namesakes:
    """The other threads of the name of the one that asks, always the same one; none where the process has that name as
    well. Looked for when the number of threads has changed: reading all names takes a millisecond where caches are
    cold.
    """

    def __init__(self) -> None:
        self._count = -1
        self._ids: list[int] = []

    def ids(self) -> list[int]:
        """Their ids; raises OSError or ValueError where the kernel does not tell."""
        count = _TASKS.stat().st_nlink  # two more than there are threads
        if count != self._count:
            self._ids = _find()
            self._count = count
        return self._ids

    def forget(self) -> None:
        """Looks for them again next time: one is gone, and another thread has begun."""
        self._count = -1

    def waited(self) -> dict[int, float]:
        """What the calling thread and these have waited for a core, in seconds, by their ids; of those of which the
        kernel tells it.
        """
        try:
            found = {thread: waited_seconds(thread) for thread in (threading.get_native_id(), *self.ids())}
        except (OSError, ValueError):
            return {}
        if None in found.values():
            self.forget()
        return {thread: seconds for thread, seconds in found.items() if seconds is not None}


def _find() -> list[int]:
    mine, name = threading.get_native_id(), Path("/proc/thread-self/comm").read_text()
    if name == Path("/proc/self/comm").read_text():
        return []
    return [int(task.name) for task in _TASKS.iterdir() if int(task.name) != mine and _name_of(task) == name]


def _name_of(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except OSError:  # it ended
        return ""
