"""Private state stays private, secrets are made once, and the machine lock knows one holder."""

from __future__ import annotations

import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from headgate.shared.errors import AlreadyRunningError, HeadgateError
from headgate.shared.state import MachineLock, StateDir, config_dir, lock_path, packaged_defaults
from headgate.shared.state_files import write_atomic


def _state(tmp_path: Path) -> StateDir:
    return StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")})


def test_the_directory_and_a_secret_are_readable_by_the_owner_only(tmp_path: Path) -> None:
    state = _state(tmp_path)
    state.secret("gateway.key", "hg-")
    assert stat.S_IMODE(state.root.stat().st_mode) == 0o700
    assert stat.S_IMODE((state.root / "gateway.key").stat().st_mode) == 0o600


def test_a_secret_is_made_once_and_long(tmp_path: Path) -> None:
    state = _state(tmp_path)
    first = state.secret("gateway.key", "hg-")
    assert first.startswith("hg-")
    assert len(first) >= 43
    assert state.secret("gateway.key", "hg-") == first


def _make_secret(root: str) -> str:
    return StateDir(Path(root)).secret("inference.token")


def test_racing_processes_agree_on_one_secret(tmp_path: Path) -> None:
    root = str(_state(tmp_path).root)
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert len(set(pool.map(_make_secret, [root] * 8))) == 1
    assert sorted(os.listdir(root)) == ["inference.token"]


def test_a_secret_others_can_read_is_refused_with_the_mend(tmp_path: Path) -> None:
    state = _state(tmp_path)
    state.secret("gateway.key")
    (state.root / "gateway.key").chmod(0o644)
    with pytest.raises(HeadgateError, match="chmod 600"):
        state.secret("gateway.key")


def test_a_state_directory_that_cannot_be_made_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadgateError, match="HEADGATE_STATE_DIR"):
        StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "file" / "below")})


def test_the_second_authority_is_refused_and_told_who_is_first(tmp_path: Path) -> None:
    environ = {"HEADGATE_LOCK_DIR": str(tmp_path)}
    first = MachineLock.acquire(environ, {"pid": 4711, "url": "http://127.0.0.1:8085"})
    with pytest.raises(AlreadyRunningError, match=r"pid 4711, url http://127\.0\.0\.1:8085"):
        MachineLock.acquire(environ, {"pid": 1})
    first.release()
    first.release()
    MachineLock.acquire(environ, {"pid": 2}).release()


def test_a_lock_left_by_a_dead_holder_does_not_hold(tmp_path: Path) -> None:
    environ = {"HEADGATE_LOCK_DIR": str(tmp_path)}
    lock_path(environ).write_text('{"pid": 99}')
    MachineLock.acquire(environ, {"pid": 2}).release()


def test_a_lock_directory_that_is_not_there_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(HeadgateError, match="HEADGATE_LOCK_DIR"):
        MachineLock.acquire({"HEADGATE_LOCK_DIR": str(tmp_path / "absent")}, {})


def test_an_atomic_write_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["file"]


def test_the_configuration_directory_prefers_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_dir({}) == packaged_defaults()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "models.yaml").write_text("")
    assert config_dir({}) == Path("config")
    assert config_dir({"HEADGATE_CONFIG_DIR": "/a"}) == Path("/a")
    assert config_dir({"HEADGATE_CONFIG_DIR": "/a"}, "/b") == Path("/b")
