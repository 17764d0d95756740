"""Keeps open breakers over a restart: a store in memory with a snapshot in one small file.

The file has names, the end of each open period and the time of writing, by the wall clock. It is read and written in a
thread, so that a slow disk does not delay requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Collection
from typing import Any

import pybreaker

from gateway.breaker.breakers import MAX_BREAKERS
from gateway.breaker.outcome import MAX_RETRY_AFTER_SECONDS
from gateway.breaker.state_machine import BreakerStorage, BreakerStore, MemoryStorage
from headgate.shared.state_directory import StateDir
from headgate.shared.state_files import StateFileWriter, load_state_file

NAME = "breakers.json"
FORMAT = 1
MAX_BYTES = 2**18
SETTLE_SECONDS = 0.25
"""Changes within this time are written together."""
FORGET_SECONDS = 600.0
"""An open period that ended this long before the start is ignored."""
LAST_WRITE_SECONDS = 2.0
"""How long the end of the gateway waits for the disk."""

Entry = tuple[str, str, float]
"""Provider, model (empty: the provider's own breaker), and the end of the open period in Unix seconds."""


class FileStorage(MemoryStorage):
    """A storage in memory that reports changes of what the file keeps."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        super().__init__()

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in ("state", "open_until"):
            self._on_change()


class BreakerFile(BreakerStore):
    """The breakers of one gateway and their file."""

    def __init__(
        self,
        directory: StateDir,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self._path = directory.root / NAME
        self._writer = StateFileWriter("open breakers")
        self._clock = clock
        self._wall = wall
        self.on_change: Callable[[str, str], None] | None = None
        """Called with provider and model after each change of what the file keeps."""
        self._changed = asyncio.Event()
        self._written: list[Entry] = []

    def _new(self, provider: str, model: str) -> BreakerStorage:
        return FileStorage(lambda: self._note(provider, model))

    def _note(self, provider: str, model: str) -> None:
        self._changed.set()
        if self.on_change is not None:
            self.on_change(provider, model)

    def discard(self, provider: str, model: str) -> None:
        """Forget the state of one breaker."""
        super().discard(provider, model)
        self._note(provider, model)

    async def load(self, providers: Collection[str]) -> None:
        """Open the breakers of `providers` that the file has. Logs one line if the file cannot be used."""
        stored = await asyncio.to_thread(
            load_state_file, self._path, _parse, "breakers start closed", max_bytes=MAX_BYTES
        )
        found, written = stored or ([], 0.0)
        # an open period is not longer than when it was written, even if the wall clock was set back since then
        now = max(self._wall(), written)
        for provider, model, until in found:
            remaining = min(until - now, MAX_RETRY_AFTER_SECONDS)
            if provider in providers and remaining > -FORGET_SECONDS:
                storage = self.storage(provider, model)
                storage.open_until = self._clock() + max(0.0, remaining)
                storage.state = pybreaker.STATE_OPEN
        self._written = found

    async def run(self) -> None:
        """Write changes until cancelled."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(SETTLE_SECONDS)
            self._changed.clear()
            await self._save()

    async def close(self) -> None:
        """Write the last state; give up on a disk that takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WRITE_SECONDS):
                await self._save()

    async def _save(self) -> None:
        wall = self._wall()
        entries = self._entries(wall - self._clock())
        if _is_same(entries, self._written):
            return
        content = {"format": FORMAT, "written": round(wall, 3), "breakers": entries}
        if await asyncio.to_thread(self._writer.write, self._path, content):
            self._written = entries

    def _entries(self, offset: float) -> list[Entry]:
        """The breakers that are not closed; the open period of a half-open one is over."""
        now = self._clock()
        return [
            (provider, model, round((max(storage.open_until, now) if is_open else now) + offset, 3))
            for (provider, model), storage in self._storages.items()
            if (is_open := storage.state == pybreaker.STATE_OPEN) or storage.state == pybreaker.STATE_HALF_OPEN
        ]


def _is_same(now: list[Entry], before: list[Entry]) -> bool:
    """Whether `now` and `before` have the same breakers, open until the same time (within a second)."""
    ends = {entry[:2]: entry[2] for entry in before}
    names = {entry[:2] for entry in now}
    return names == ends.keys() and all(abs(until - ends[provider, model]) < 1.0 for provider, model, until in now)


def _parse(data: Any) -> tuple[list[Entry], float]:
    """The entries and the time of writing; raises ValueError and others for another kind of file."""
    if data["format"] != FORMAT:
        raise ValueError("its format version is not supported")
    entries = [_entry(item) for item in data["breakers"][:MAX_BREAKERS]]
    written = float(data.get("written", 0.0))  # missing in files of an earlier version
    return entries, written if math.isfinite(written) else 0.0


def _entry(item: object) -> Entry:
    match item:
        case [str(provider), str(model), float() | int() as until] if math.isfinite(until):
            (provider + model).encode()  # raises ValueError for half a surrogate pair
            return provider, model, float(until)
    raise ValueError("it was not written by a gateway")
