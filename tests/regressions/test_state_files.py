"""State files that are damaged, not regular files, or cannot be written."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.breaker.breaker_file import BreakerFile
from gateway.shared_state.gateway_count import GatewayCountFile
from headgate.cli.addresses import Record
from headgate.shared.errors import HeadgateError
from headgate.shared.state_directory import MachineLock, StateDir
from headgate.shared.state_files import load_state_file, read_regular, write_atomic
from inference.devices.accelerator_record import AcceleratorRecord, Circumstances
from inference.devices.build_check import BuildCheck
from inference.estimate.estimator import Estimator
from inference.estimate.headrooms import Headrooms
from inference.estimate.overheads import Overheads
from inference.workers import orphans
from inference.workers.crash_records import CrashStore

pytestmark = pytest.mark.timeout(60)


async def _breakers(state: StateDir) -> None:
    await BreakerFile(state).load(("local",))


async def _gateway_count(state: StateDir) -> None:
    assert await GatewayCountFile(state).load() == 1


async def _accelerators(state: StateDir) -> None:
    AcceleratorRecord(state, Circumstances({}, "", ())).check(0, cpu_configured=False)


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
    "gateways.json": _gateway_count,
    "build.json": _build,
}
"""All state files of the two services and the code that reads them at start (crash records: when they are shown)."""


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
async def test_state_file_that_is_not_regular_is_ignored_with_a_log_line(
    state: StateDir, name: str, put: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The line names the path and the remedy. A pipe does not block."""
    put(state.root / name)
    await READERS[name](state)
    lines = [record.getMessage() for record in caplog.records if record.name == "headgate.shared.state_files"]
    (line,) = [line for line in lines if not line.startswith("cannot save")]
    assert line.startswith(f"{state.root / name} is a ")
    assert line.endswith(". Move it away")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"version": 99}', b"[" * 9000], ids=range(6))
async def test_each_damaged_file_is_kept_and_has_its_own_log_line(
    state: StateDir, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The line names the file, the loss, and the copy."""
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


async def test_file_of_another_version_is_ignored_without_a_log_line(
    state: StateDir, caplog: pytest.LogCaptureFixture
) -> None:
    (state.root / "estimates.json").write_text(json.dumps({"version": 0, "entries": {}}))
    await READERS["estimates.json"](state)
    assert caplog.records == []
    assert not (state.root / "estimates.json.damaged").exists()


def test_file_beyond_the_size_limit_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.json").write_bytes(b" " * 100)
    assert load_state_file(tmp_path / "x.json", dict, "nothing", max_bytes=99) is None
    assert "larger than 99 bytes" in caplog.text


def test_damaged_file_that_cannot_be_renamed_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.json").write_bytes(b"{")
    (tmp_path / "x.json.damaged" / "full").mkdir(parents=True)
    assert load_state_file(tmp_path / "x.json", dict, "x starts empty") is None
    assert "x starts empty; renaming it to" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_file_without_permission_is_reported_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.json").write_bytes(b"{}")
    (tmp_path / "x.json").chmod(0)
    assert load_state_file(tmp_path / "x.json", dict, "x starts empty") is None
    assert "cannot be read (Permission denied): x starts empty" in caplog.text


def test_missing_file_is_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_state_file(tmp_path / "x.json", dict, "x starts empty") is None
    assert read_regular(tmp_path / "x.json", 10) is None
    assert caplog.text == ""


def test_failed_atomic_write_names_its_target_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "up.json").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_atomic(tmp_path / "up.json", b"{}")
    assert caught.value.filename == str(tmp_path / "up.json")
    assert caught.value.filename2 is None
    assert os.listdir(tmp_path) == ["up.json"]


@pytest.mark.parametrize("name", ["up.json", "up.lock"])
def test_up_refuses_a_directory_instead_of_its_files_with_a_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    record = Record(1, "http://127.0.0.1:1", "http://127.0.0.1:2")
    with pytest.raises(HeadgateError, match=r"move it away, or set HEADGATE_STATE_DIR") as caught:
        record.published(StateDir(tmp_path)).__enter__()
    assert f" {tmp_path / name} (" in str(caught.value)
    assert Record.read(StateDir(tmp_path)) is None


def test_up_does_not_open_pipes_instead_of_its_files(tmp_path: Path) -> None:
    """A pipe instead of the lock is refused; a pipe instead of the record is replaced."""
    record = Record(os.getpid(), "http://127.0.0.1:1", "http://127.0.0.1:2")
    os.mkfifo(tmp_path / "up.json")
    assert Record.read(StateDir(tmp_path)) is None
    with record.published(StateDir(tmp_path)):
        assert Record.read(StateDir(tmp_path)) == record
    (tmp_path / "up.lock").unlink()
    os.mkfifo(tmp_path / "up.lock")
    with pytest.raises(HeadgateError, match=r"up\.lock \(a pipe instead of a file\)"):
        record.published(StateDir(tmp_path)).__enter__()


def test_pipe_instead_of_the_machine_lock_is_refused_with_a_remedy(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "headgate-authority.lock")
    with pytest.raises(HeadgateError, match="a pipe instead of a file") as caught:
        MachineLock.acquire({"HEADGATE_LOCK_DIR": str(tmp_path)}, {})
    assert "remove it, or set HEADGATE_LOCK_DIR" in str(caught.value)


def test_pipe_instead_of_a_secret_is_refused_without_opening_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gateway.key", 0o600)
    with pytest.raises(HeadgateError, match="a pipe instead of a file; move it away"):
        StateDir(tmp_path).read_secret("gateway.key")


@pytest.fixture
def keys(tmp_path: Path) -> StateDir:
    return StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")})


def _write_key(keys: StateDir, content: bytes) -> Path:
    path = keys.file("gateway.key")
    path.write_bytes(content)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("content", [b"", b"\n", b" \t\r\n"])
def test_empty_key_file_is_replaced_by_a_new_key(keys: StateDir, content: bytes) -> None:
    path = _write_key(keys, content)
    assert keys.read_secret("gateway.key") is None
    fresh = keys.secret("gateway.key", "hg-")
    assert len(fresh) > 40
    assert keys.secret("gateway.key", "hg-") == fresh == path.read_text().strip()
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(keys.root) == ["gateway.key"]


def _read_or_create_key(root: str) -> str:
    return StateDir(Path(root)).secret("gateway.key")


def test_processes_that_replace_an_empty_key_agree_on_one_key(keys: StateDir) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        for _ in range(20):
            _write_key(keys, b"")
            assert len(set(pool.map(_read_or_create_key, [str(keys.root)] * 8, chunksize=1))) == 1
    assert os.listdir(keys.root) == ["gateway.key"]


@pytest.mark.parametrize("content", ["clé".encode(), b"\xff\xfe\x00", b"two\nlines", b"a\0b"])
def test_invalid_key_file_is_refused_with_its_path_and_a_remedy(keys: StateDir, content: bytes) -> None:
    path = _write_key(keys, content)
    with pytest.raises(HeadgateError, match="move it away") as caught:
        keys.secret("gateway.key")
    assert str(path) in str(caught.value)
    assert path.read_bytes() == content


def test_directory_instead_of_a_key_file_is_refused_with_a_remedy(keys: StateDir) -> None:
    keys.file("gateway.key").mkdir(mode=0o700)
    with pytest.raises(HeadgateError, match=r"gateway\.key is a directory instead of a file; move it away"):
        keys.secret("gateway.key")


_FULL = """
import resource
from pathlib import Path
from headgate.shared.errors import HeadgateError
from headgate.shared.state_directory import StateDir
from headgate.shared.state_files import write_atomic
keys = StateDir(Path({root!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    keys.secret("gateway.key")
except HeadgateError as error:
    print(error)
try:
    write_atomic(keys.file("up.json"), b"x")
except OSError as error:
    print(error.filename)
"""


def test_full_disk_is_reported_with_the_path_and_leaves_no_file(keys: StateDir) -> None:
    argv = [sys.executable, "-c", _FULL.format(root=str(keys.root))]
    printed = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    assert printed[0].startswith(f"cannot write {keys.root / 'gateway.key'} (")
    assert "HEADGATE_STATE_DIR" in printed[0]
    assert printed[1] == str(keys.root / "up.json")
    assert os.listdir(keys.root) == []


def test_atomic_write_without_a_directory_names_its_target(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_atomic(tmp_path / "absent" / "file", b"x")
    assert caught.value.filename == str(tmp_path / "absent" / "file")
