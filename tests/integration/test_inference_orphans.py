"""A service ends only the processes that an earlier service left, identified by token and start time, not by pid."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.shared.state_directory import StateDir
from inference.workers.orphans import FAMILY_ENV, end_orphans, start_ticks

SLEEP = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")})


GONE = 2**22 + 1
"""A pid that no process can have."""


class Strays:
    """Processes that do not end with their parent."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, token: str | None, *, stopped: bool = False) -> subprocess.Popen[bytes]:
        environ = {name: value for name, value in os.environ.items() if name != FAMILY_ENV}
        stray = subprocess.Popen(
            SLEEP, env=environ | ({} if token is None else {FAMILY_ENV: token}), stdout=subprocess.PIPE
        )
        self.started.append(stray)
        assert stray.stdout is not None
        assert stray.stdout.readline() == b"\n"
        if stopped:
            stray.send_signal(signal.SIGSTOP)
        return stray


@pytest.fixture
def strays() -> Iterator[Strays]:
    found = Strays()
    yield found
    for stray in found.started:
        stray.kill()
        stray.wait()
        assert stray.stdout is not None
        stray.stdout.close()


def _write(state: StateDir, token: str, pid: int, began_at: int) -> None:
    (state.root / "family.json").write_text(json.dumps([{"token": token, "pid": pid, "began": began_at}]))


def test_only_processes_with_the_token_are_ended(state: StateDir, strays: Strays) -> None:
    mine, stopped = strays.start("token-1"), strays.start("token-1", stopped=True)
    others = [strays.start("token-2"), strays.start(None)]
    first = start_ticks(mine.pid)
    assert first is not None
    environ: dict[str, str] = {}
    _write(state, "token-1", GONE, first)
    assert set(end_orphans(state, environ)) == {mine.pid, stopped.pid}
    assert mine.wait(5) == stopped.wait(5) == -signal.SIGKILL
    assert all(stray.poll() is None for stray in others)
    (own,) = json.loads((state.root / "family.json").read_text())
    assert own == {"token": environ[FAMILY_ENV], "pid": os.getpid(), "began": start_ticks(os.getpid())}
    assert len(own["token"]) == 32


def test_process_older_than_the_service_is_not_ended(state: StateDir, strays: Strays) -> None:
    stray = strays.start("token-1")
    started = start_ticks(stray.pid)
    assert started is not None
    _write(state, "token-1", GONE, started + 1)
    assert end_orphans(state, {}) == []
    assert stray.poll() is None


def test_children_of_a_running_service_are_ended_after_it(state: StateDir, strays: Strays) -> None:
    living, child = strays.start(None), strays.start("token-1")
    started = start_ticks(living.pid)
    assert started is not None
    _write(state, "token-1", living.pid, started)
    assert end_orphans(state, {}) == []
    assert child.poll() is None
    living.kill()
    living.wait()
    assert end_orphans(state, {}) == [child.pid]


@pytest.mark.parametrize("text", ["", "{}", '[{"token": 1}]', '[{"token": "", "pid": 1, "began": 0}]', "[3]"])
def test_damaged_record_ends_no_process(state: StateDir, text: str) -> None:
    (state.root / "family.json").write_text(text)
    assert end_orphans(state, {}) == []


def test_no_process_is_ended_without_proc(state: StateDir, strays: Strays, tmp_path: Path) -> None:
    stray = strays.start("token-1")
    _write(state, "token-1", GONE, 0)
    assert end_orphans(state, {}, tmp_path / "no-proc") == []
    assert stray.poll() is None
