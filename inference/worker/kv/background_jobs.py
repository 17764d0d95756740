"""A thread that runs jobs in their order. The results are applied later, on the thread that uses them."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger("headgate.worker.kv")

Apply = Callable[[], None]
Job = Callable[[], Apply | None]
"""Runs on the thread; the result runs in `BackgroundJobs.apply`."""


class BackgroundJobs:
    """Jobs of one owner, run in order on a thread, which calls `on_result` when `apply` has something to do."""

    def __init__(self, name: str, on_result: Callable[[], None]) -> None:
        self._on_result = on_result
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._results: deque[Apply] = deque()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, job: Job) -> None:
        """Queues a job."""
        self._jobs.put(job)

    def apply(self) -> None:
        """Applies the results so far."""
        while self._results:
            try:
                self._results.popleft()()
            except Exception:
                log.exception("internal error: a result of the sequence store could not be applied")

    def close(self, seconds: float) -> bool:
        """Ends the thread after the queued jobs; returns whether it ended within `seconds`."""
        self._jobs.put(None)
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                result = job()
            except Exception:
                log.exception("internal error: a background job of the sequence store failed")
                continue
            if result is not None:
                self._results.append(result)
                self._on_result()
