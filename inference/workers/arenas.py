"""Host memory for stored sequences that outlives the workers of a model.

Each model has one arena, an anonymous memory file. The service holds it open and passes it to each worker of the model,
so that stored sequences survive the end of a worker. The worker that uses an arena has a lock on it.
"""

from __future__ import annotations

import fcntl
import os

from inference.workers.os_api import anonymous_memory


class Arenas:
    """The arenas by model."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._dropped: set[str] = set()

    def open(self, model: str) -> int | None:
        """The descriptor of the arena of `model`, which is created if there is none; None where not supported."""
        self.keep(model)
        if model not in self._files and (file := anonymous_memory()) is not None:
            self._files[model] = file
        return self._files.get(model)

    def used_bytes(self) -> dict[str, int]:
        """The memory that each arena takes now."""
        return {model: os.fstat(file).st_blocks * 512 for model, file in self._files.items()}

    def drop(self, model: str, *, has_process: bool) -> None:
        """Frees the memory of an arena at once, or when the worker that uses it ends.

        `has_process`: a process of the model is running. A process that only inherited the arena may use it later.
        """
        file = self._files.get(model)
        if file is None:
            return
        _empty(file)
        if has_process:
            self._dropped.add(model)
        else:
            self._close(model)

    def keep(self, model: str) -> None:
        """A process of `model` is about to use its arena, which may have been dropped."""
        self._dropped.discard(model)

    def process_ended(self, model: str) -> None:
        """The last process of `model` has ended: a dropped arena is closed."""
        if model in self._dropped:
            self._close(model)

    def close(self) -> None:
        """Frees all arenas."""
        for model in list(self._files):
            self._close(model)

    def _close(self, model: str) -> None:
        self._dropped.discard(model)
        os.close(self._files.pop(model))


def _empty(file: int) -> None:
    """Frees the memory of `file`, unless a worker uses it: its mappings must stay valid."""
    try:
        own = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC)  # a lock belongs to an open file
    except OSError:
        return
    try:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(own, 0)
    except OSError:
        pass
    finally:
        os.close(own)
