"""The state directory, secrets, the lock of the machine, and the configuration directory."""

from __future__ import annotations

import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from headgate.shared.errors import AlreadyRunningError, HeadgateError
from headgate.shared.state_directory import MachineLock, StateDir, config_dir, lock_path, packaged_defaults
from headgate.shared.state_files import write_atomic


def _state(tmp_path: Path) -> StateDir:
    return StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")})


def test_secret_is_created_once_and_readable_by_the_owner_only(tmp_path: Path) -> None:
    state = _state(tmp_path)
    first = state.secret("gateway.key", "hg-")
    assert first.startswith("hg-")
    assert len(first) >= 43
    assert state.secret("gateway.key", "hg-") == first
    assert stat.S_IMODE(state.root.stat().st_mode) == 0o700
    assert stat.S_IMODE((state.root / "gateway.key").stat().st_mode) == 0o600


def _make_secret(root: str) -> str:
    return StateDir(Path(root)).secret("inference.token")


def test_concurrent_processes_create_one_secret(tmp_path: Path) -> None:
    root = str(_state(tmp_path).root)
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert len(set(pool.map(_make_secret, [root] * 8))) == 1
    assert sorted(os.listdir(root)) == ["inference.token"]


def test_secret_readable_by_others_is_an_error_with_advice(tmp_path: Path) -> None:
    state = _state(tmp_path)
    state.secret("gateway.key")
    (state.root / "gateway.key").chmod(0o644)
    with pytest.raises(HeadgateError, match="chmod 600"):
        state.secret("gateway.key")


def test_error_of_an_impossible_state_directory_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadgateError, match="HEADGATE_STATE_DIR"):
        StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "file" / "below")})


def test_second_authority_gets_an_error_with_the_first_one(tmp_path: Path) -> None:
    environ = {"HEADGATE_LOCK_DIR": str(tmp_path)}
    first = MachineLock.acquire(environ, {"pid": 4711, "url": "http://127.0.0.1:8085"})
    with pytest.raises(AlreadyRunningError, match=r"pid 4711, url http://127\.0\.0\.1:8085"):
        MachineLock.acquire(environ, {"pid": 1})
    first.release()
    first.release()
    MachineLock.acquire(environ, {"pid": 2}).release()


def test_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    environ = {"HEADGATE_LOCK_DIR": str(tmp_path)}
    lock_path(environ).write_text('{"pid": 99}')
    MachineLock.acquire(environ, {"pid": 2}).release()


def test_error_of_a_missing_lock_directory_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(HeadgateError, match="HEADGATE_LOCK_DIR"):
        MachineLock.acquire({"HEADGATE_LOCK_DIR": str(tmp_path / "absent")}, {})


def test_atomic_write_leaves_one_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["file"]


def test_order_of_configuration_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_dir({}) == packaged_defaults()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "models.yaml").write_text("")
    assert config_dir({}) == Path("config")
    assert config_dir({"HEADGATE_CONFIG_DIR": "/a"}) == Path("/a")
    assert config_dir({"HEADGATE_CONFIG_DIR": "/a"}, "/b") == Path("/b")
