"""Keeps over a restart which breakers are not closed, in one small file; a file that cannot be used changes nothing.

Only names, the end of each open period and the time of writing stand there, by the wall clock. Disks are read and
written in a thread: a slow one never holds up a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from gateway.breaker.breakers import MAX_GUARDS, Breakers
from gateway.breaker.outcome import MAX_RETRY_AFTER_SECONDS
from headgate.shared.errors import HeadgateError
from headgate.shared.recovery import recovered
from headgate.shared.state import StateDir, write_atomic

log = logging.getLogger("gateway.breaker.breaker_file")

NAME = "breakers.json"
FORMAT = 1
MAX_BYTES = 2**18
SETTLE_SECONDS = 0.25
"""Changes that come together are written together."""
FORGET_SECONDS = 600.0
"""An open period that ended so long before the start says nothing any more."""
LAST_WRITE_SECONDS = 2.0
"""How long the end of the gateway waits for the disk."""

Entry = tuple[str, str, float]
"""Provider, model (empty: the provider's own breaker), and the end of the open period in Unix seconds."""


class BreakerFile:
    """The file of one gateway. `providers` tells which ones there are: breakers of others are foreign."""

    def __init__(
        self,
        state: StateDir,
        breakers: Breakers,
        providers: Callable[[], Collection[str]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._state = state
        self._breakers = breakers
        self._providers = providers
        self._wall = wall
        self._changed = asyncio.Event()
        self._written: list[Entry] = []
        self._fails = False

    def note(self) -> None:
        """A breaker moved: the file is to be written soon."""
        self._changed.set()

    async def restore(self) -> None:
        """Opens the breakers that were open before; one line in the log about a file that cannot be used."""
        try:
            found, written = await asyncio.to_thread(_read, self._state)
        except HeadgateError as error:
            log.warning("breakers start closed: %s", error)
            return
        # nobody has more left than there was: a clock that was set back tells no longer wait
        now, providers = max(self._wall(), written), self._providers()
        for provider, model, until in found:
            left = min(until - now, MAX_RETRY_AFTER_SECONDS)
            if provider in providers and left > -FORGET_SECONDS:
                self._breakers.restore(provider, model, max(0.0, left))
        self._written = found

    async def run(self) -> None:
        """Writes what changed until cancelled."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(SETTLE_SECONDS)
            self._changed.clear()
            await self._save()

    async def close(self) -> None:
        """Writes the last state; gives up on a disk that takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WRITE_SECONDS):
                await self._save()

    async def _save(self) -> None:
        now = self._wall()
        entries = [(provider, model, round(now + left, 3)) for provider, model, left in self._breakers.kept()]
        if _same(entries, self._written):
            return
        data = json.dumps({"format": FORMAT, "written": round(now, 3), "breakers": entries}).encode()
        try:
            await asyncio.to_thread(_write, self._state, data)
        except (OSError, HeadgateError) as error:
            if not self._fails:
                log.warning("open breakers cannot be kept for a restart (%s); the gateway goes on without", error)
            self._fails = True
            return
        self._written, self._fails = entries, False


def _same(now: list[Entry], before: list[Entry]) -> bool:
    """Whether writing `now` would change nothing that matters."""
    ends = {entry[:2]: entry[2] for entry in before}
    names = {entry[:2] for entry in now}
    return names == ends.keys() and all(abs(until - ends[provider, model]) < 1.0 for provider, model, until in now)


def _path(state: StateDir) -> Path:
    return state.file(NAME)


def _write(state: StateDir, data: bytes) -> None:
    write_atomic(_path(state), data)


def _read(state: StateDir) -> tuple[list[Entry], float]:
    """What the file holds and when it was written; nothing of a file that cannot be used. Raises HeadgateError."""
    return recovered(_path(state), _kept, "breakers start closed", most_bytes=MAX_BYTES) or ([], 0.0)


def _kept(data: Any) -> tuple[list[Entry], float]:
    """The same from the file's content; raises ValueError and others for what is none of ours."""
    if data["format"] != FORMAT:
        raise ValueError("it is of another version")
    entries = [_entry(item) for item in data["breakers"][:MAX_GUARDS]]
    written = float(data.get("written", 0.0))  # a former version did not say
    return entries, written if math.isfinite(written) else 0.0


def _entry(item: object) -> Entry:
    match item:
        case [str(provider), str(model), float() | int() as until] if math.isfinite(until):
            (provider + model).encode()  # raises ValueError: half a surrogate pair could be told to nobody
            return provider, model, float(until)
    raise ValueError("it is not what a gateway writes")
