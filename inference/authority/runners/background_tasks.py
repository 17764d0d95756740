"""Coroutines that perform effects in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger("inference.authority")


class BackgroundTasks:
    """Tasks that run beside the event loop's other work; their errors are logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._finishing: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], *, finishes: bool = False) -> asyncio.Task[None]:
        """Runs a coroutine. With `finishes` it is not cancelled, so it must be quick."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        if finishes:
            self._finishing.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._finishing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task of the authority failed", exc_info=error)

    async def end(self) -> None:
        """Cancels the tasks and returns when all are done."""
        for task in self._tasks - self._finishing:
            task.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
