"""A verb that looked for a running system made `headgate up` say that one ran already, with nothing running."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

from headgate.cli.addresses import LOCK, Record
from headgate.shared.errors import AlreadyRunningError
from headgate.shared.state import StateDir

MINE = Record(1, "http://127.0.0.1:1", "http://127.0.0.1:2")


def test_who_only_looks_refuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `headgate ps` read the record, while there is one, in the very moment of each lock."""
    state, flock = StateDir(tmp_path), fcntl.flock

    def looked_at(handle: Any, operation: int) -> None:
        if operation == fcntl.LOCK_EX | fcntl.LOCK_NB and (record := state.file("up.json")).exists():
            with record.open("rb") as reader:
                flock(reader, fcntl.LOCK_SH | fcntl.LOCK_NB)
                flock(handle, operation)
        else:  # who waits for a lock has it after that moment
            flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", looked_at)
    state.file("up.json").write_bytes(b"left by one that was killed")
    with MINE.published(state):
        assert Record.read(state) == MINE
    assert Record.read(state) is None


def test_the_later_of_two_that_start_at_once_writes_nothing(tmp_path: Path) -> None:
    """Its pid and address stood in the record, which the other then held as its own."""
    state = StateDir(tmp_path)
    with state.file(LOCK).open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(AlreadyRunningError, match="already runs with the state directory"), MINE.published(state):
            pass
        assert not state.file("up.json").exists()
    with MINE.published(state):
        assert Record.read(state) == MINE
