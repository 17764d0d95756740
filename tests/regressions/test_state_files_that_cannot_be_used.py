"""Pipes in place of state files hung the start, and damaged state files were dropped without a word."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.breaker.breaker_file import BreakerFile
from headgate.cli.addresses import Record
from headgate.shared.errors import HeadgateError
from headgate.shared.state import MachineLock, StateDir
from headgate.shared.state_files import load_state_file, read_regular, write_atomic
from inference.devices.accelerator_memory import Circumstances, Unreached
from inference.devices.build_check import BuildCheck
from inference.estimate.estimator import Estimator
from inference.estimate.headrooms import Headrooms
from inference.estimate.overheads import Overheads
from inference.workers import orphans
from inference.workers.crash_records import CrashStore

pytestmark = pytest.mark.timeout(20)


async def _breakers(state: StateDir) -> None:
    await BreakerFile(state, lambda: ("local",)).load()


async def _accelerators(state: StateDir) -> None:
    Unreached(state, Circumstances({}, "", ())).check(0, cpu_asked=False)


async def _family(state: StateDir) -> None:
    orphans.end_orphans(state, {}, proc=state.root / "no-proc")


async def _build(state: StateDir) -> None:
    async def computes(*_: Any, **__: Any) -> dict[str, Any]:
        return {}

    await BuildCheck(state, run=computes, find=lambda: state.root, stamp=state.root / "no-stamp").at_start()


def _made(make: Callable[[StateDir], Any]) -> Callable[[StateDir], Awaitable[None]]:
    async def read(state: StateDir) -> None:
        make(state)

    return read


READERS: dict[str, Callable[[StateDir], Awaitable[None]]] = {
    "estimates.json": _made(lambda state: Estimator(state, seconds=1)),
    "overheads.json": _made(Overheads),
    "headroom.json": _made(Headrooms),
    "family.json": _family,
    "accelerators.json": _accelerators,
    "crashes/demo.json": _made(lambda state: CrashStore(state).of("demo")),
    "breakers.json": _breakers,
    "build.json": _build,
}
"""Every state file of the two services, and what reads it at start (crash records: when they are shown)."""


def pipe(path: Path) -> None:
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.mkdir()


def unix_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path)
    state.directory("crashes")
    return state


@pytest.mark.parametrize("put", [pipe, directory, unix_socket])
@pytest.mark.parametrize("name", READERS)
async def test_what_is_no_file_is_ignored_with_its_path(
    state: StateDir, name: str, put: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing waits for a writer of a pipe, and the line in the log says what to do."""
    put(state.root / name)
    await READERS[name](state)
    lines = [record.getMessage() for record in caplog.records if record.name == "headgate.shared.state_files"]
    (line,) = [line for line in lines if not line.startswith("cannot save")]
    assert line.startswith(f"{state.root / name} is a ")
    assert line.endswith(". Move it away")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"version": 99}', b"[" * 9000], ids=range(6))
async def test_each_damaged_file_has_a_line_of_its_own_and_is_kept(
    state: StateDir, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The line names the file, what is lost, and where the damaged copy is."""
    for name in READERS:
        (state.root / name).write_bytes(content)
    for read in READERS.values():
        await read(state)
    lines = [record.getMessage() for record in caplog.records if record.name == "headgate.shared.state_files"]
    damaged = [name for name in READERS if (state.root / f"{name}.damaged").exists()]
    assert damaged
    assert len(lines) == len(damaged)
    for name, line in zip(damaged, lines, strict=True):
        kept = state.root / f"{name}.damaged"
        assert line.startswith(f"{state.root / name} is damaged (")
        assert line.endswith(f"; the damaged file is kept as {kept}")
        assert kept.read_bytes() == content
    if content in (b"", b"{", b"\xff"):
        assert len(damaged) == len(READERS)


async def test_a_file_of_another_version_is_no_damage(state: StateDir, caplog: pytest.LogCaptureFixture) -> None:
    """An upgrade starts without it and says nothing."""
    (state.root / "estimates.json").write_text(json.dumps({"version": 0, "entries": {}}))
    await READERS["estimates.json"](state)
    assert "damaged" not in caplog.text


def test_a_file_larger_than_any_of_ours_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is not read whole."""
    (tmp_path / "x.json").write_bytes(b" " * 100)
    assert load_state_file(tmp_path / "x.json", dict, "nothing", most_bytes=99) is None
    assert "larger than 99 bytes" in caplog.text


def test_a_damaged_file_that_cannot_be_renamed_is_still_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory is in the place of the copy."""
    (tmp_path / "x.json").write_bytes(b"{")
    (tmp_path / "x.json.damaged" / "full").mkdir(parents=True)
    assert load_state_file(tmp_path / "x.json", dict, "x starts empty") is None
    assert "x starts empty; renaming it to" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is not damaged, and stays where it is."""
    (tmp_path / "x.json").write_bytes(b"{}")
    (tmp_path / "x.json").chmod(0)
    assert load_state_file(tmp_path / "x.json", dict, "x starts empty") is None
    assert "cannot be read (Permission denied): x starts empty" in caplog.text


def test_a_missing_file_is_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first start has none."""
    assert load_state_file(tmp_path / "x.json", dict, "x starts empty") is None
    assert read_regular(tmp_path / "x.json", 10) is None
    assert caplog.text == ""


def test_a_write_over_a_directory_names_the_file(tmp_path: Path) -> None:
    """The error named the temporary file beside it."""
    (tmp_path / "up.json").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_atomic(tmp_path / "up.json", b"{}")
    assert caught.value.filename == str(tmp_path / "up.json")
    assert caught.value.filename2 is None
    assert os.listdir(tmp_path) == ["up.json"]


@pytest.mark.parametrize("name", ["up.json", "up.lock"])
def test_up_says_what_to_do_about_a_directory_in_place_of_its_files(tmp_path: Path, name: str) -> None:
    """The message names the path and the two ways out."""
    (tmp_path / name).mkdir()
    record = Record(1, "http://127.0.0.1:1", "http://127.0.0.1:2")
    with pytest.raises(HeadgateError, match=r"move it away, or set HEADGATE_STATE_DIR") as caught:
        record.published(StateDir(tmp_path)).__enter__()
    assert f" {tmp_path / name} (" in str(caught.value)
    assert Record.read(StateDir(tmp_path)) is None


def test_up_does_not_wait_for_pipes_in_place_of_its_files(tmp_path: Path) -> None:
    """A pipe for a lock is refused; one for the record is replaced by the record."""
    record = Record(os.getpid(), "http://127.0.0.1:1", "http://127.0.0.1:2")
    os.mkfifo(tmp_path / "up.json")
    assert Record.read(StateDir(tmp_path)) is None
    with record.published(StateDir(tmp_path)):
        assert Record.read(StateDir(tmp_path)) == record
    (tmp_path / "up.lock").unlink()
    os.mkfifo(tmp_path / "up.lock")
    with pytest.raises(HeadgateError, match=r"up\.lock \(a pipe instead of a file\)"):
        record.published(StateDir(tmp_path)).__enter__()


def test_a_pipe_in_place_of_the_machine_lock_is_refused(tmp_path: Path) -> None:
    """The message says what to do."""
    os.mkfifo(tmp_path / "headgate-authority.lock")
    with pytest.raises(HeadgateError, match="a pipe instead of a file") as caught:
        MachineLock.acquire({"HEADGATE_LOCK_DIR": str(tmp_path)}, {})
    assert "remove it, or set HEADGATE_LOCK_DIR" in str(caught.value)


def test_a_pipe_in_place_of_a_secret_is_refused(tmp_path: Path) -> None:
    """Without a wait."""
    os.mkfifo(tmp_path / "gateway.key", 0o600)
    with pytest.raises(HeadgateError, match="a pipe instead of a file; move it away"):
        StateDir(tmp_path).read_secret("gateway.key")
