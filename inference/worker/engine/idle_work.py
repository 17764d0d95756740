"""Does one piece of work when nobody has been served for a while; knows neither the work nor the requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Protocol

IDLE_SECONDS = 1.0
"""Who asks one question after the other has asked again by then."""


class Timer(Protocol):
    """What can be called off."""

    def cancel(self) -> None:
        """Calls it off."""
        ...


def _later(seconds: float, call: Callable[[], object]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, call)


class IdleTask:
    """On the event loop, whose owner says when it is busy and when it is quiet."""

    def __init__(
        self,
        work: Callable[[], object],
        executor: Executor,
        later: Callable[[float, Callable[[], object]], Timer] = _later,
    ) -> None:
        """`work` runs on `executor`, once, and again in a later lull where it returns True."""
        self._work: Callable[[], object] | None = work
        self._executor = executor
        self._later = later
        self._timer: Timer | None = None

    def busy(self) -> None:
        """Somebody is served."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def idle(self) -> None:
        """Nobody is served any more."""
        if self._work is not None:
            self.busy()
            self._timer = self._later(IDLE_SECONDS, self._start)

    def _start(self) -> None:
        if (work := self._work) is not None:
            self._work = self._timer = None
            self._executor.submit(work).add_done_callback(partial(self._done, work))

    def _done(self, work: Callable[[], object], job: Future[object]) -> None:
        """On whatever thread the work ended."""
        if not job.cancelled() and job.exception() is None and job.result() is True:
            self._work = work
