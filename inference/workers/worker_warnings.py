"""Selects the lines of a worker's output that the log of the service repeats: warnings about stored sequences.

The rest of the output is kept for the crash record only, because llama.cpp writes much of it.
"""

from __future__ import annotations

import json
import logging
import re

LOGGER = "headgate.worker.kv"
MAX_LINES = 20
"""Lines in PERIOD_SECONDS that are repeated; a directory of damaged files has thousands."""
PERIOD_SECONDS = 60.0

_LEVELS = {"warning": logging.WARNING, "error": logging.ERROR}
_TEXT = re.compile(r"[\d:.]+ (warning|error) +" + re.escape(LOGGER) + r" (.*)")


class WarningSelector:
    """The lines of one worker."""

    def __init__(self) -> None:
        self._since = float("-inf")
        self._count = 0

    def select(self, line: str, now: float) -> tuple[int, str] | None:
        """The level and the message of a line that is to be repeated. `now`: monotonic seconds."""
        if LOGGER not in line or (found := _text(line) or _json(line)) is None:
            return None
        if now - self._since >= PERIOD_SECONDS:
            self._since, self._count = now, 0
        self._count += 1
        if self._count > MAX_LINES:
            return None
        level, message = found
        return level, f"{message}; further lines are left out for a while" if self._count == MAX_LINES else message


def _text(line: str) -> tuple[int, str] | None:
    match = _TEXT.fullmatch(line)
    return None if match is None else (_LEVELS[match[1]], match[2])


def _json(line: str) -> tuple[int, str] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or entry.get("logger") != LOGGER or entry.get("level") not in _LEVELS:
        return None
    return _LEVELS[entry["level"]], str(entry.get("message"))
