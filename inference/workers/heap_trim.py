"""Makes workers drop retained prefixes and trims heaps, also that of the service; measures the released bytes."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterable, Mapping

from inference.worker import malloc_trim as heap
from inference.worker_link import BEAT_SECONDS
from inference.workers.os_api import private_bytes
from inference.workers.worker_process import WorkerProcess

ANSWER_SECONDS = 6 * BEAT_SECONDS
"""Time within which the heartbeats of a worker show the effect."""


async def trim(
    workers: Mapping[str, WorkerProcess], *, fresh_first: bool
) -> tuple[int, dict[str, int], dict[str, tuple[int, int]]]:
    """Released bytes; remaining bytes of each process; retained cells of each before and after.

    `fresh_first`: wait for new heartbeats first, because the last ones may be older than the last answers.
    """
    if fresh_first:
        await _fresh_beats(workers.values())
    retained = _retained(workers)
    before = {id: private_bytes(worker.pid) or 0 for id, worker in workers.items()}
    own = private_bytes(os.getpid()) or 0
    for worker in workers.values():
        worker.forget()
    await asyncio.to_thread(_trim_ourselves)
    for _ in range(2):  # the first heartbeat may have been sent before the order arrived
        await _fresh_beats(workers.values())
    left = {id: private_bytes(worker.pid) or before[id] for id, worker in workers.items()}
    freed = sum(max(0, before[id] - count) for id, count in left.items())
    freed += max(0, own - (private_bytes(os.getpid()) or own))
    still = _retained(workers)
    return freed, left, {id: (count, still.get(id, count)) for id, count in retained.items()}


def _retained(workers: Mapping[str, WorkerProcess]) -> dict[str, int]:
    """Retained cells of each worker, from its last heartbeat."""
    return {id: worker.beat.cells_retained for id, worker in workers.items() if worker.beat is not None}


def _trim_ourselves() -> None:
    """A full garbage collection, which blocks the service for some tens of milliseconds."""
    gc.collect()
    heap.trim()


async def _fresh_beats(workers: Iterable[WorkerProcess]) -> None:
    """Returns when every worker has sent a heartbeat, or after ANSWER_SECONDS."""
    old = {worker: worker.beat for worker in workers}
    deadline = asyncio.get_running_loop().time() + ANSWER_SECONDS
    while any(worker.beat is beat and not worker.exited.done() for worker, beat in old.items()):
        if asyncio.get_running_loop().time() > deadline:
            return
        await asyncio.sleep(BEAT_SECONDS / 10)
