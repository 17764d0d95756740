"""Logging of a service process to stderr, as text or JSON. In text a traceback follows its line."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

STDERR = 2
MAX_BUFFERED_BYTES = 2**20
"""Limit of the lines that wait for a slow reader: about ten thousand lines."""
MAX_LINE_CHARS = 500
"""Longest text of a line in the dashboard."""
FLUSH_SECONDS = 1.0
"""How long a process waits at its end for the last lines to be written."""

_QUIET_LOGGERS = (
    "uvicorn", "uvicorn.access", "httpx", "httpx2", "httpcore", "httpcore2", "openai", "anthropic", "aiohttp",
    "aiohttp.access", "asyncio",
)  # fmt: skip


def set_up(environ: Mapping[str, str], *, in_background: bool = False) -> None:
    """Configures the root logger of the process from HEADGATE_LOG_LEVEL and HEADGATE_LOG_FORMAT (text or json).

    An unknown level counts as `info`, an unknown format as `text`.

    With `in_background` a thread writes the lines, so that a slow reader of stderr does not block the event loop.
    """
    handler = _BackgroundHandler() if in_background else logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if environ.get("HEADGATE_LOG_FORMAT") == "json" else _TextFormatter())
    level = environ.get("HEADGATE_LOG_LEVEL", "info").upper()
    known = logging.getLevelNamesMapping()
    logging.basicConfig(level=known.get(level, logging.INFO), handlers=[handler], force=True)
    quiet()


def quiet() -> None:
    """Silences libraries below warnings: their lines contain addresses, headers and bodies of requests."""
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def on_one_line(text: str) -> str:
    """`text` with line breaks and control characters escaped, because messages contain text from clients."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def line_of(record: logging.LogRecord) -> dict[str, Any]:
    """A log record for the dashboard: its time in Unix seconds, level, logger, and the beginning of its text."""
    text = on_one_line(record.getMessage())[:MAX_LINE_CHARS]
    return {"at": round(record.created, 3), "level": record.levelname.lower(), "logger": record.name, "text": text}


def dropped_lines(count: int) -> str:
    """The line that stands for `count` dropped lines."""
    return f"{count} lines before this one were dropped: the reader of this output was too slow"


class LineWriter:
    """Writes lines to a file descriptor from a thread of its own; `put` does not block.

    A stopped terminal (Ctrl-S), a pager or a hanging log driver does not block the callers. Up to `max_bytes` wait
    for the reader; an empty buffer takes a line of any length. Lines beyond that are dropped and counted, and
    `describe_dropped` makes the line that stands in their place.
    """

    def __init__(
        self,
        descriptor: int = STDERR,
        describe_dropped: Callable[[int], str] = dropped_lines,
        max_bytes: int = MAX_BUFFERED_BYTES,
    ) -> None:
        self._descriptor = descriptor
        self._describe_dropped = describe_dropped
        self._max_bytes = max_bytes
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._dropped = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        """Queues `line`, which has no line feed yet."""
        raw = (line + "\n").encode("utf-8", "backslashreplace")
        with self._changed:
            if self._bytes and self._bytes + len(raw) > self._max_bytes:
                self._dropped += 1
                return
            self._append_dropped()
            self._append(raw)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="lines", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, seconds: float) -> None:
        """Waits until everything is written, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes, seconds)

    def _append(self, raw: bytes) -> None:
        self._waiting.append(raw)
        self._bytes += len(raw)

    def _append_dropped(self) -> None:
        if self._dropped:
            count, self._dropped = self._dropped, 0
            self._append((self._describe_dropped(count) + "\n").encode("utf-8", "backslashreplace"))

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                raw = self._waiting.popleft()
            with contextlib.suppress(OSError):  # a closed pipe or a full disk: there is no place to report it
                self._write(raw)
            with self._changed:
                self._bytes -= len(raw)
                if not self._waiting:
                    self._append_dropped()
                self._changed.notify_all()

    def _write(self, raw: bytes) -> None:
        while raw:
            try:
                raw = raw[os.write(self._descriptor, raw) :]
            except BlockingIOError:  # another process made the shared descriptor non-blocking
                select.select([], [self._descriptor], [])


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        message = on_one_line(record.getMessage())
        line = f"{stamp}.{int(record.msecs):03d} {record.levelname.lower():7} {record.name} {message}"
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class _BackgroundHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self._lines = LineWriter(describe_dropped=self._describe_dropped)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put(self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self._lines.flush(FLUSH_SECONDS)

    def _describe_dropped(self, count: int) -> str:
        fields = {"name": __name__, "levelname": "WARNING", "levelno": logging.WARNING, "msg": dropped_lines(count)}
        return self.format(logging.makeLogRecord(fields))
