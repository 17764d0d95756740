"""Keeps the number of live gateways over a restart, for a start without the store.

The file is read and written in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from headgate.shared.state_directory import StateDir
from headgate.shared.state_files import StateFileWriter, load_state_file

NAME = "gateways.json"
MAX_BYTES = 4096
MAX_GATEWAYS = 10_000
HOLD_SECONDS = 300.0
"""How long a smaller number holds before it is stored: gateways that stop together leave one after the other."""


class GatewayCountFile:
    """The file of one gateway."""

    def __init__(self, directory: StateDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = directory.root / NAME
        self._writer = StateFileWriter("the number of gateways")
        self._clock = clock
        self._stored: int | None = None
        self._fewer_since: float | None = None
        self._writing: asyncio.Task[None] | None = None

    async def load(self) -> int:
        """The number that was stored last; 1 without one. Logs one line if the file cannot be used."""
        consequence = "this gateway takes the whole limits and budgets until the server of `state:` answers"
        self._stored = await asyncio.to_thread(load_state_file, self._path, _parse, consequence, max_bytes=MAX_BYTES)
        return self._stored or 1

    def note(self, count: int) -> None:
        """Stores a new number in the background, a smaller one after HOLD_SECONDS. Call it regularly: it does nothing
        while a write runs.
        """
        if self._stored is None or count >= self._stored:
            self._fewer_since = None
        else:
            if self._fewer_since is None:
                self._fewer_since = self._clock()
            if self._clock() - self._fewer_since < HOLD_SECONDS:
                return
        if count != self._stored and (self._writing is None or self._writing.done()):
            self._writing = asyncio.create_task(self._write(count))

    async def _write(self, count: int) -> None:
        if await asyncio.to_thread(self._writer.write, self._path, {"gateways": count}):
            self._stored = count

    async def close(self) -> None:
        """Does not wait for a slow disk."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)


def _parse(data: Any) -> int:
    count = data["gateways"]
    if type(count) is not int or not 1 <= count <= MAX_GATEWAYS:
        raise ValueError(f"the number of gateways is not between 1 and {MAX_GATEWAYS}")
    return count
