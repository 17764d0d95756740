"""A full disk: state that cannot be saved is logged once and does not stop a service."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from headgate.shared.state_directory import StateDir
from headgate.shared.state_files import StateFileWriter
from headgate.shared.units import MIB
from inference.devices.device import Reading
from inference.estimate.overheads import Overheads
from inference.protocol import ExitCause
from inference.workers.crash_records import CrashStore
from inference.workers.exit_cause import WorkerExit

EXIT = WorkerExit(ExitCause.ASSERT, -6, "GGML_ASSERT(x) failed", (), was_ready=True)
CARD = Reading("gpu-0", "cuda", "H200", 1000 * MIB, 900 * MIB, 100 * MIB, driver="580.1")


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")})


def test_failing_writes_are_logged_once_and_again_when_they_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    files = StateFileWriter("estimates")
    blocked = tmp_path / "blocked"
    blocked.write_bytes(b"a file in place of the directory")
    for _ in range(5):
        assert not files.write(blocked / "file", {})
    assert files.write(tmp_path / "new" / "file", {})
    assert files.write(tmp_path / "new" / "file", [])
    assert (tmp_path / "new" / "file").read_bytes() == b"[]"
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot save estimates ({blocked}: File exists); the service continues, but the next start may have old data",
        "saving estimates works again",
    ]


def test_unsaved_crash_records_are_listed(state: StateDir) -> None:
    """They are saved with the next record when their directory can be created."""
    store = CrashStore(state)
    (state.root / "crashes").write_bytes(b"a file in place of the directory")
    store.add("a", 1, EXIT, [])
    store.add("a", 2, EXIT, [])
    assert [record["pid"] for record in store.of("a")] == [2, 1]
    assert store.of("b") == []
    (state.root / "crashes").unlink()
    store.add("a", 3, EXIT, [])
    assert [record["pid"] for record in CrashStore(state).of("a")] == [3, 2, 1]


def test_unsaved_overheads_are_used(state: StateDir) -> None:
    """A directory is in the place of the file."""
    (state.root / "overheads.json").mkdir()
    overheads = Overheads(state)
    overheads.learn(CARD, 700 * MIB)
    assert overheads.of(CARD) == int(700 * MIB * 1.1)
