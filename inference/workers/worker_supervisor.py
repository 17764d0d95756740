"""Starts worker processes and ends them all; never decides what is loaded, nor when a worker is dead.

Spawning happens on the main thread: the kernel's death signal of a child follows the *thread* that made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from headgate.shared.errors import HeadgateError
from headgate.shared.state import StateDir
from inference.workers.hang_detection import Patience
from inference.workers.kernel_oom_kills import HostKills
from inference.workers.os_api import nameless_memory, socket_directory
from inference.workers.worker_process import WorkerProcess

WORKER_COMMAND = (sys.executable, "-m", "inference.worker")


class Supervisor:
    """Spawns workers; keeps the directory of their sockets."""

    def __init__(
        self,
        state: StateDir,
        patience: Patience,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        build_is_trusted: Callable[[], bool] = lambda: False,
    ) -> None:
        """`build_is_trusted`: as workers are given it."""
        self._build_is_trusted = build_is_trusted
        self._patience = patience
        self._command = tuple(command)
        self._directory = socket_directory(state)
        self._count = 0
        self.kills = HostKills()
        self.workers: set[WorkerProcess] = set()
        for left in self._directory.glob("*.sock"):  # of an authority that was killed; we hold its lock now
            left.unlink(missing_ok=True)

    def spawn(
        self,
        name: str,
        environment: Mapping[str, str],
        on_change: Callable[[], None],
        *,
        after: WorkerProcess | None = None,
    ) -> WorkerProcess:
        """Starts a worker for `name`; `on_change` is called after progress and beats. Raises HeadgateError.

        Must run on the main thread, within the running loop. What the worker `after` saves, the new one can restore.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("workers are started from the main thread only")
        self._count += 1
        self.kills.look(asyncio.get_running_loop().time())
        path = self._directory / f"{os.getpid()}-{self._count}.sock"
        keep = nameless_memory() if after is None else after.shared_keep()
        try:
            worker = WorkerProcess(
                name,
                path,
                self._command,
                environment,
                self._patience,
                on_change,
                keep,
                self.kills,
                self._build_is_trusted,
            )
        except HeadgateError:
            if keep is not None:
                os.close(keep)
            raise
        self.workers.add(worker)
        worker.exited.add_done_callback(lambda _: self.workers.discard(worker))
        return worker

    async def close(self) -> None:
        """Ends every worker and returns when the last one is reaped."""
        for worker in list(self.workers):
            worker.stop()
        await asyncio.gather(*(asyncio.shield(worker.exited) for worker in list(self.workers)))
        with contextlib.suppress(OSError):  # not empty: somebody else's, or already gone
            self._directory.rmdir()
