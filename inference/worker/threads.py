"""Names threads and finds those of a name; starts none, and decides nothing about them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from inference.worker.hardware import waited_seconds

_TASKS = Path("/proc/self/task")


def name_thread(name: str) -> None:
    """Names the calling thread, as its companions will be that OpenMP makes for it; up to 15 bytes on Linux, elsewhere
    nothing.
    """
    with contextlib.suppress(OSError):
        Path("/proc/thread-self/comm").write_text(name)


def namesakes() -> list[int]:
    """The other threads of the calling one's name; none when the process has that name as well. Raises OSError where
    the kernel does not tell.
    """
    mine, name = threading.get_native_id(), Path("/proc/thread-self/comm").read_text()
    if name == Path("/proc/self/comm").read_text():
        return []
    return [int(task.name) for task in _TASKS.iterdir() if int(task.name) != mine and _name_of(task) == name]


def waited() -> dict[int, float]:
    """What the calling thread and its namesakes have waited for a core, in seconds, by their ids; of those of which the
    kernel tells it.
    """
    try:
        found = {thread: waited_seconds(thread) for thread in (threading.get_native_id(), *namesakes())}
    except (OSError, ValueError):
        return {}
    return {thread: seconds for thread, seconds in found.items() if seconds is not None}


def _name_of(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except OSError:  # it ended
        return ""
