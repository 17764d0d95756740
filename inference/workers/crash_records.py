"""Stores records of crashed workers in the state directory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

from headgate.shared.state_directory import StateDir
from headgate.shared.state_files import StateFileWriter, load_state_file
from inference.workers.exit_cause import WorkerExit

KEPT = 20


class CrashStore:
    """The last KEPT crash records per model, newest first."""

    def __init__(self, state: StateDir) -> None:
        self._folder = state.root / "crashes"
        self._files = StateFileWriter("crash records")
        self._unwritten: dict[str, list[dict[str, Any]]] = {}
        """Records that could not be written, by file name."""

    def add(self, model: str, pid: int, exit: WorkerExit, requests: Sequence[dict[str, Any]]) -> None:
        """Stores a record. `requests` describes the requests in flight, without their texts."""
        record = {
            "time": round(time.time(), 3),
            "pid": pid,
            "cause": str(exit.cause),
            "status": exit.status,
            "message": exit.message,
            "was_ready": exit.was_ready,
            "beat": asdict(exit.beat) if exit.beat is not None else None,
            "requests": list(requests),
            "last_lines": list(exit.last_lines[-50:]),
        }
        records = [record, *self.of(model)][:KEPT]
        name = _file_name(model)
        self._unwritten[name] = records
        if self._files.write(self._folder / name, records):
            del self._unwritten[name]

    def of(self, model: str) -> list[dict[str, Any]]:
        """The records of a model. An unreadable file counts as empty."""
        name = _file_name(model)
        if name in self._unwritten:
            return self._unwritten[name]
        return load_state_file(self._folder / name, _records, f"crash records of {model} are not shown") or []


def _records(data: Any) -> list[dict[str, Any]]:
    """The records in the file's content."""
    if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
        raise ValueError("it is not a list of records")
    return data


def _file_name(model: str) -> str:
    return quote(model, safe="")[:200] + ".json"
