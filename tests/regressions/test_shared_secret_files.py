"""A key file that a crash had left empty ended both services in a RecursionError; damaged ones in a traceback."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headgate.shared.errors import HeadgateError
from headgate.shared.state import StateDir
from headgate.shared.state_files import write_atomic


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")})


def _leave(state: StateDir, content: bytes) -> Path:
    path = state.file("gateway.key")
    path.write_bytes(content)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("content", [b"", b"\n", b" \t\r\n"])
def test_an_empty_file_is_replaced_by_a_fresh_secret_that_stays(state: StateDir, content: bytes) -> None:
    path = _leave(state, content)
    assert state.read_secret("gateway.key") is None
    fresh = state.secret("gateway.key", "hg-")
    assert len(fresh) > 40
    assert state.secret("gateway.key", "hg-") == fresh == path.read_text().strip()
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(state.root) == ["gateway.key"]


def _make(root: str) -> str:
    return StateDir(Path(root)).secret("gateway.key")


def test_racing_processes_that_find_it_empty_agree_on_one_secret(state: StateDir) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        for _ in range(20):
            _leave(state, b"")
            assert len(set(pool.map(_make, [str(state.root)] * 8, chunksize=1))) == 1
    assert os.listdir(state.root) == ["gateway.key"]


@pytest.mark.parametrize("content", ["clé".encode(), b"\xff\xfe\x00", b"two\nlines", b"a\0b"])
def test_what_is_no_key_is_refused_with_its_place_and_the_mend(state: StateDir, content: bytes) -> None:
    path = _leave(state, content)
    with pytest.raises(HeadgateError, match="move it away") as caught:
        state.secret("gateway.key")
    assert str(path) in str(caught.value)
    assert path.read_bytes() == content


def test_a_directory_in_the_place_of_a_key_is_refused_with_its_place_and_the_mend(state: StateDir) -> None:
    state.file("gateway.key").mkdir(mode=0o700)
    with pytest.raises(HeadgateError, match=r"gateway\.key is a directory instead of a file; move it away"):
        state.secret("gateway.key")


_FULL = """
import resource
from pathlib import Path
from headgate.shared.errors import HeadgateError
from headgate.shared.state import StateDir
from headgate.shared.state_files import write_atomic
state = StateDir(Path({root!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    state.secret("gateway.key")
except HeadgateError as error:
    print(error)
try:
    write_atomic(state.file("up.json"), b"x")
except OSError as error:
    print(error.filename)
"""


def test_a_disk_that_takes_no_more_is_told_with_the_place_and_nothing_is_left(state: StateDir) -> None:
    argv = [sys.executable, "-c", _FULL.format(root=str(state.root))]
    said = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    assert said[0].startswith(f"cannot write {state.root / 'gateway.key'} (")
    assert "HEADGATE_STATE_DIR" in said[0]
    assert said[1] == str(state.root / "up.json")
    assert os.listdir(state.root) == []


def test_an_atomic_write_where_no_directory_is_names_its_target(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_atomic(tmp_path / "absent" / "file", b"x")
    assert caught.value.filename == str(tmp_path / "absent" / "file")
