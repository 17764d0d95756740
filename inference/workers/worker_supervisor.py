"""Starts worker processes, trims their memory, and ends them at shutdown.

Workers are started from the main thread, because the kernel's parent-death signal follows the *thread* that started
the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from headgate.shared.state_directory import StateDir
from inference.worker import malloc_trim
from inference.worker_link import BEAT_SECONDS, Forget, KvLabels, Timings
from inference.workers.arenas import Arenas
from inference.workers.hang_detection import HangTimeouts
from inference.workers.os_api import KernelOomKills, private_bytes, socket_directory
from inference.workers.worker_process import WorkerProcess

ANSWER_SECONDS = 6 * BEAT_SECONDS
"""Time within which the heartbeats of a worker show the effect of an order."""
WORKER_COMMAND = (sys.executable, "-m", "inference.worker")


class Supervisor:
    """Starts workers, and owns the directory of their sockets and the arenas for their stored sequences."""

    def __init__(
        self,
        state: StateDir,
        timeouts: HangTimeouts,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        build_is_trusted: Callable[[], bool] = lambda: False,
        on_timings: Callable[[Timings], None] = lambda _timings: None,
        on_labels: Callable[[WorkerProcess, KvLabels | None], None] = lambda _process, _labels: None,
    ) -> None:
        """`build_is_trusted`: see WorkerProcess. `on_timings` gets the times of traced requests, `on_labels` which
        labels of prompts a worker has: changes, or None when it has none any more.
        """
        self._on_labels = on_labels
        self._on_timings = on_timings
        self._build_is_trusted = build_is_trusted
        self._timeouts = timeouts
        self._command = tuple(command)
        self._directory = socket_directory(state)
        self._count = 0
        self.kills = KernelOomKills()
        self.arenas = Arenas()
        self.workers: set[WorkerProcess] = set()
        for left in self._directory.glob("*.sock"):  # left by a killed service, whose lock this one holds now
            left.unlink(missing_ok=True)

    def spawn(
        self,
        name: str,
        environment: Mapping[str, str],
        on_change: Callable[[], None],
        *,
        stores: bool = False,
    ) -> WorkerProcess:
        """Starts a worker for `name` and calls `on_change` after its progress messages and heartbeats.

        Must be called on the main thread within the running event loop. `stores`: the worker gets the arena of `name`.
        Raises HeadgateError.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("workers must be started from the main thread")
        self._count += 1
        self.kills.update(asyncio.get_running_loop().time())
        worker = WorkerProcess(
            name,
            self._directory / f"{os.getpid()}-{self._count}.sock",
            self._command,
            environment,
            self._timeouts,
            on_change,
            self.arenas.open(name) if stores else None,
            self.kills,
            self._build_is_trusted,
            self._on_timings,
            self._on_labels,
        )
        self.workers.add(worker)
        worker.exited.add_done_callback(lambda _: self._ended(worker))
        return worker

    def _ended(self, worker: WorkerProcess) -> None:
        self.workers.discard(worker)
        if not self._has_process(worker.name):
            self.arenas.process_ended(worker.name)

    def _has_process(self, name: str) -> bool:
        return any(worker.name == name for worker in self.workers)

    def drop_arena(self, name: str) -> None:
        """Frees the host memory of the stored sequences of `name`."""
        self.arenas.drop(name, has_process=self._has_process(name))

    async def close(self) -> None:
        """Ends all workers and returns when the last one is reaped."""
        for worker in list(self.workers):
            worker.stop()
        await asyncio.gather(*(asyncio.shield(worker.exited) for worker in list(self.workers)))
        self.arenas.close()
        with contextlib.suppress(OSError):  # not empty, or already removed
            self._directory.rmdir()


async def trim_heaps(
    workers: Mapping[str, WorkerProcess], arenas: Arenas, *, fresh_first: bool
) -> tuple[int, dict[str, int], dict[str, tuple[int, int]]]:
    """Makes workers drop retained prefixes and trims heaps, also that of the service.

    Returns released bytes; remaining bytes of each process; retained cells of each before and after.

    `fresh_first`: wait for new heartbeats first, because the last ones may be older than the last answers.
    """
    if fresh_first:
        await _fresh_beats(workers.values())
    retained = _retained(workers)
    before = worker_bytes(workers, arenas)
    own = private_bytes(os.getpid()) or 0
    for worker in workers.values():
        worker.send(Forget())
    await asyncio.to_thread(_trim_service)
    for _ in range(2):  # the first heartbeat may have been sent before the order arrived
        await _fresh_beats(workers.values())
    left = before | worker_bytes(workers, arenas)
    freed = sum(max(0, count - left[id]) for id, count in before.items())
    freed += max(0, own - (private_bytes(os.getpid()) or own))
    still = _retained(workers)
    return freed, left, {id: (count, still.get(id, count)) for id, count in retained.items()}


def worker_bytes(workers: Mapping[str, WorkerProcess], arenas: Arenas) -> dict[str, int]:
    """The host memory of each worker without its arena; without those whose memory cannot be read."""
    stored = arenas.used_bytes()
    found = {id: private_bytes(worker.pid, stored.get(worker.name, 0)) for id, worker in workers.items()}
    return {id: count for id, count in found.items() if count is not None}


def _retained(workers: Mapping[str, WorkerProcess]) -> dict[str, int]:
    """Retained cells of each worker, from its last heartbeat."""
    return {id: worker.beat.cells_retained for id, worker in workers.items() if worker.beat is not None}


def _trim_service() -> None:
    """A full garbage collection, which blocks the service for some tens of milliseconds."""
    gc.collect()
    malloc_trim.trim()


async def _fresh_beats(workers: Iterable[WorkerProcess]) -> None:
    """Returns when every worker has sent a heartbeat, or after ANSWER_SECONDS."""
    old = {worker: worker.beat for worker in workers}
    deadline = asyncio.get_running_loop().time() + ANSWER_SECONDS
    while any(worker.beat is beat and not worker.exited.done() for worker, beat in old.items()):
        if asyncio.get_running_loop().time() > deadline:
            return
        await asyncio.sleep(BEAT_SECONDS / 10)
