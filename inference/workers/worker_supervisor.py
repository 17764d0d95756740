"""Starts worker processes and ends them at shutdown.

Workers are started from the main thread, because the kernel's parent-death signal follows the *thread* that started
the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from headgate.shared.errors import HeadgateError
from headgate.shared.state_directory import StateDir
from inference.workers.hang_detection import HangTimeouts
from inference.workers.kernel_oom_kills import KernelOomKills
from inference.workers.os_api import anonymous_memory, socket_directory
from inference.workers.worker_process import WorkerProcess

WORKER_COMMAND = (sys.executable, "-m", "inference.worker")


class Supervisor:
    """Starts workers and owns the directory of their sockets."""

    def __init__(
        self,
        state: StateDir,
        timeouts: HangTimeouts,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        build_is_trusted: Callable[[], bool] = lambda: False,
    ) -> None:
        """`build_is_trusted`: see WorkerProcess."""
        self._build_is_trusted = build_is_trusted
        self._timeouts = timeouts
        self._command = tuple(command)
        self._directory = socket_directory(state)
        self._count = 0
        self.kills = KernelOomKills()
        self.workers: set[WorkerProcess] = set()
        for left in self._directory.glob("*.sock"):  # left by a killed service, whose lock this one holds now
            left.unlink(missing_ok=True)

    def spawn(
        self,
        name: str,
        environment: Mapping[str, str],
        on_change: Callable[[], None],
        *,
        after: WorkerProcess | None = None,
    ) -> WorkerProcess:
        """Starts a worker for `name` and calls `on_change` after its progress messages and heartbeats.

        Must be called on the main thread within the running event loop. The new worker can restore the sequences that
        the worker `after` saved. Raises HeadgateError.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("workers must be started from the main thread")
        self._count += 1
        self.kills.update(asyncio.get_running_loop().time())
        path = self._directory / f"{os.getpid()}-{self._count}.sock"
        keep = anonymous_memory() if after is None else after.duplicate_keep()
        try:
            worker = WorkerProcess(
                name,
                path,
                self._command,
                environment,
                self._timeouts,
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
        """Ends all workers and returns when the last one is reaped."""
        for worker in list(self.workers):
            worker.stop()
        await asyncio.gather(*(asyncio.shield(worker.exited) for worker in list(self.workers)))
        with contextlib.suppress(OSError):  # not empty, or already removed
            self._directory.rmdir()
