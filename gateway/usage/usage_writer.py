"""Stores usage in a thread of its own: requests never wait for the disk, and never fail because of it."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from gateway.usage.capture import Captured, redacted
from gateway.usage.usage_file import StoredKey, UsageFile, UsageRow, advice
from headgate.shared.errors import HeadgateError

log = logging.getLogger("gateway.usage")

WRITE_SECONDS = 1.0
"""Time between two batches; a new or revoked key takes effect within this time."""
MAX_WAITING = 20_000
"""Rows that wait for a disk that is full or slow; the oldest are lost beyond it."""
MAX_CAPTURES = 200
"""Bodies that wait; the oldest are lost beyond it."""
CLEAN_SECONDS = 600.0
CLOSE_SECONDS = 5.0


class Retention(NamedTuple):
    """How long rows are kept, in seconds, and in how many bytes."""

    seconds: float
    max_bytes: int


class UsageWriter:
    """The thread and its queue. `on_keys` is called in the thread with all stored keys when they may have changed."""

    def __init__(
        self,
        directory: Path,
        retention: Callable[[], Retention],
        on_keys: Callable[[Sequence[StoredKey]], None],
        now: Callable[[], float] = time.time,
        redact: Callable[[str], str] = redacted,
    ) -> None:
        self._directory = directory
        self._retention = retention
        self._on_keys = on_keys
        self._now = now
        self._redact = redact
        self._rows: deque[UsageRow] = deque(maxlen=MAX_WAITING)
        self._captures: deque[Captured] = deque(maxlen=MAX_CAPTURES)
        self._lost = 0
        self._is_failing = False
        self._file: UsageFile | None = None
        self._revision: int | None = None
        self._clean_at = 0.0
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def put(self, row: UsageRow) -> None:
        """Queues a row; does not block."""
        self._lost += len(self._rows) == MAX_WAITING
        self._rows.append(row)

    def put_bodies(self, captured: Captured) -> None:
        """Queues bodies; does not block."""
        self._captures.append(captured)

    def close(self) -> None:
        """Writes what is queued and ends the thread; waits CLOSE_SECONDS at most."""
        self._stopping = True
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)

    def flush(self) -> None:
        """One batch: writes, applies changed keys, removes old rows if due. Errors are logged once, until it works."""
        batch: list[UsageRow] = []
        bodies: list[Captured] = []
        try:
            if self._file is not None and not self._file.is_in_place():
                log.warning("the usage file in %s was removed or replaced; it is opened again", self._directory)
                self._close_file()
            if self._file is None:
                self._file = UsageFile(self._directory)
            while self._rows:
                batch.append(self._rows.popleft())
            while self._captures:
                bodies.append(self._captures.popleft())
            if batch or bodies:
                self._file.add(batch, self._without_secrets(bodies))
                batch, bodies = [], []
            self._note_keys(self._file)
            self._clean(self._file)
        except (sqlite3.Error, OSError, HeadgateError) as error:
            kept = batch[max(0, len(batch) + len(self._rows) - MAX_WAITING) :]
            self._lost += len(batch) - len(kept)
            self._rows.extendleft(reversed(kept))
            self._captures.extendleft(reversed(bodies[max(0, len(bodies) + len(self._captures) - MAX_CAPTURES) :]))
            if not self._is_failing:
                log.warning(
                    "usage cannot be stored in %s: %s; up to %d requests are kept in memory until it can",
                    self._directory, advice(error), MAX_WAITING,
                )  # fmt: skip
            self._is_failing = True
            if isinstance(error, sqlite3.DatabaseError):
                self._close_file()
        else:
            if self._is_failing:
                log.warning("usage is stored again; the usage of %d requests was lost", self._lost)
            self._is_failing, self._lost = False, 0

    def _without_secrets(self, bodies: Sequence[Captured]) -> list[Captured]:
        """Redacted `bodies`. One that cannot be redacted is left out, so that rows are stored."""
        found = []
        for body in bodies:
            try:
                texts = self._redact(body.request), self._redact(body.answer)
            except Exception:
                log.exception("internal error: the bodies of request %s are not stored", body.id)
            else:
                found.append(body._replace(request=texts[0], answer=texts[1]))
        return found

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._revision = None

    def _note_keys(self, file: UsageFile) -> None:
        if (revision := file.revision()) != self._revision:
            self._on_keys(file.stored_keys())
            self._revision = revision

    def _clean(self, file: UsageFile) -> None:
        if (now := self._now()) < self._clean_at:
            return
        self._clean_at = now + CLEAN_SECONDS
        retention = self._retention()
        removed = file.drop_before(now - retention.seconds) + file.shrink_to(retention.max_bytes)
        if removed:
            log.info("removed the usage of %d old requests", removed)

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(WRITE_SECONDS)
            self._try_flush()
        self._try_flush()  # what came while the last batch was written
        self._close_file()

    def _try_flush(self) -> None:
        try:
            self.flush()
        except Exception:
            log.exception("internal error: usage could not be stored")
