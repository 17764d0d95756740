"""Runs a task once the worker has been idle for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Protocol

IDLE_SECONDS = 1.0
"""A client with consecutive requests sends its next request within this time."""


class Timer(Protocol):
    """A timer that can be cancelled."""

    def cancel(self) -> None:
        """Cancels the timer."""
        ...


def _later(seconds: float, call: Callable[[], object]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, call)


class IdleTask:
    """Runs `work` after IDLE_SECONDS without a request. Call its methods on the event loop."""

    def __init__(
        self,
        work: Callable[[], object],
        executor: Executor,
        later: Callable[[float, Callable[[], object]], Timer] = _later,
    ) -> None:
        """`work` runs on `executor` once, and again in a later idle period if it returns True."""
        self._work: Callable[[], object] | None = work
        self._executor = executor
        self._later = later
        self._timer: Timer | None = None

    def busy(self) -> None:
        """A request is running: cancels the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def idle(self) -> None:
        """No request is running: starts the timer."""
        if self._work is not None:
            self.busy()
            self._timer = self._later(IDLE_SECONDS, self._start)

    def _start(self) -> None:
        if (work := self._work) is not None:
            self._work = self._timer = None
            self._executor.submit(work).add_done_callback(partial(self._done, work))

    def _done(self, work: Callable[[], object], job: Future[object]) -> None:
        """Runs on the thread of the executor."""
        if not job.cancelled() and job.exception() is None and job.result() is True:
            self._work = work
