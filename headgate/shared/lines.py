"""Writes lines to a descriptor by a thread of its own, so that nobody waits for who reads them; words none itself.

A terminal that stands still (Ctrl-S, a selection), a pager, a log driver that hangs: what they do not take is kept up
to a bound, and one line of any length. What comes beyond it is left out and counted, and told in its place once there
is room again.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable

STDERR = 2
MOST_BYTES = 2**20
"""What may wait for a reader: some ten thousand lines."""


def left_out(count: int) -> str:
    """The sentence that stands for `count` lines."""
    return f"{count} lines before this one are left out: what they were written to did not take them in time"


class Lines:
    """What is `put` is written to `descriptor`, in order, from whatever thread. What it refuses is lost.

    `tell` words the line that stands for so many that were left out.
    """

    def __init__(
        self, descriptor: int = STDERR, tell: Callable[[int], str] = left_out, most_bytes: int = MOST_BYTES
    ) -> None:
        self._descriptor = descriptor
        self._tell = tell
        self._most_bytes = most_bytes
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._left_out = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        """Has `line` written soon; a line feed is added."""
        raw = (line + "\n").encode("utf-8", "backslashreplace")
        with self._changed:
            if self._bytes and self._bytes + len(raw) > self._most_bytes:
                self._left_out += 1
                return
            self._note_left_out()
            self._append(raw)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="lines", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, seconds: float) -> None:
        """Waits until all is written, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes, seconds)

    def _append(self, raw: bytes) -> None:
        self._waiting.append(raw)
        self._bytes += len(raw)

    def _note_left_out(self) -> None:
        if self._left_out:
            count, self._left_out = self._left_out, 0
            self._append((self._tell(count) + "\n").encode("utf-8", "backslashreplace"))

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                raw = self._waiting.popleft()
            with contextlib.suppress(OSError):  # a reader that left, a full disk: nobody could be told
                self._write(raw)
            with self._changed:
                self._bytes -= len(raw)
                if not self._waiting:
                    self._note_left_out()
                self._changed.notify_all()

    def _write(self, raw: bytes) -> None:
        while raw:
            try:
                raw = raw[os.write(self._descriptor, raw) :]
            except BlockingIOError:  # who shares it made it so
                select.select([], [self._descriptor], [])
