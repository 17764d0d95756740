"""Keeps what is known of each model's crashed workers in the state directory; decides nothing."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from headgate.shared.state import StateDir, write_atomic
from inference.process import WorkerExit

log = logging.getLogger(__name__)

KEPT = 20


class CrashStore:
    """The last KEPT crash records per model, newest first."""

    def __init__(self, state: StateDir) -> None:
        self._state = state

    def add(self, model: str, pid: int, exit: WorkerExit, requests: Sequence[dict[str, Any]]) -> None:
        """Keeps one record; `requests` are the shapes (never the texts) of what was in flight."""
        record = {
            "time": round(time.time(), 3),
            "pid": pid,
            "cause": str(exit.cause),
            "status": exit.status,
            "message": exit.message,
            "was_ready": exit.was_ready,
            "requests": list(requests),
            "last_lines": list(exit.last_lines[-50:]),
        }
        records = [record, *self.of(model)][:KEPT]
        try:
            path = self._state.file("crashes", _file_name(model))
            write_atomic(path, json.dumps(records).encode())
        except OSError as error:
            log.warning("the crash record of %s cannot be kept (%s)", model, error.strerror)

    def of(self, model: str) -> list[dict[str, Any]]:
        """The records of a model; an unreadable file counts as none."""
        try:
            data = json.loads(self._state.file("crashes", _file_name(model)).read_bytes())
        except (OSError, ValueError):
            return []
        return data if isinstance(data, list) else []


def _file_name(model: str) -> str:
    return quote(model, safe="")[:200] + ".json"
