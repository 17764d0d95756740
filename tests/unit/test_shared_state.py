"""The state directory, secrets, the lock of the machine, and configuration files."""

from __future__ import annotations

import multiprocessing
import os
import stat
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from headgate.shared.configfile import Duration, load, unset_name
from headgate.shared.errors import AlreadyRunningError, ConfigError, HeadgateError
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


def test_error_of_a_state_directory_that_cannot_be_created_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadgateError, match="HEADGATE_STATE_DIR"):
        StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "file" / "below")})


def test_second_inference_service_gets_an_error_that_names_the_first_one(tmp_path: Path) -> None:
    environ = {"HEADGATE_LOCK_DIR": str(tmp_path)}
    first = MachineLock.acquire(environ, {"pid": 4711, "url": "http://127.0.0.1:8085"})
    with pytest.raises(AlreadyRunningError, match=r"pid 4711, url http://127\.0\.0\.1:8085"):
        MachineLock.acquire(environ, {"pid": 1})
    first.release()
    first.release()
    MachineLock.acquire(environ, {"pid": 2}).release()


def test_lock_of_an_ended_process_is_taken_over(tmp_path: Path) -> None:
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


def test_configuration_directories_are_tried_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_dir({}) == packaged_defaults()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "models.yaml").write_text("")
    assert config_dir({}) == Path("config")
    assert config_dir({"HEADGATE_CONFIG_DIR": "/a"}) == Path("/a")
    assert config_dir({"HEADGATE_CONFIG_DIR": "/a"}, "/b") == Path("/b")


class _Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    context_length: int = 4096
    idle_timeout: Duration = 300.0


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    models: dict[str, _Inner] = {}
    api_key: str | None = None


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    return path


def test_correct_file_is_read(tmp_path: Path) -> None:
    path = _write(tmp_path, "models:\n  a/b:\n    context_length: 128\n    idle_timeout: 5m\n")
    read = load(path, _File, {})
    assert read.models["a/b"].context_length == 128
    assert read.models["a/b"].idle_timeout == 300
    assert load(_write(tmp_path, "{}"), _File, {}) == _File()


def test_unknown_key_is_reported_with_its_line_and_a_suggestion(tmp_path: Path) -> None:
    path = _write(tmp_path, "models:\n  demo:\n    context_lenght: 128\n")
    with pytest.raises(ConfigError) as caught:
        load(path, _File, {})
    (problem,) = caught.value.problems
    assert (problem.file, problem.line, problem.key) == (path, 3, "models.demo.context_lenght")
    assert "did you mean 'context_length'?" in problem.message


def test_all_problems_are_reported(tmp_path: Path) -> None:
    path = _write(tmp_path, "modles: {}\nmodels:\n  demo:\n    context_length: lots\n    idle_timeout: soon\n")
    with pytest.raises(ConfigError) as caught:
        load(path, _File, {})
    assert [problem.line for problem in caught.value.problems] == [4, 5, 1]
    assert "'lots'" in str(caught.value)
    assert "30s" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("models: [\n", 2, "expected"),
        ("models: {}\nmodels: {}\n", 2, "duplicate key"),
        ("- a\n", 1, "NAME: VALUE"),
        ("models: {}\n---\nmodels: {}\n", 2, "a second YAML document begins here"),
        ("a: !!python/object:os.system {}\n", 1, "could not determine a constructor"),
    ],
)
def test_invalid_yaml_is_reported_with_its_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(_write(tmp_path, text), _File, {})
    (problem,) = caught.value.problems
    assert problem.line == line
    assert message in problem.message


def test_missing_and_binary_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "absent.yaml", _File, {})
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(binary, _File, {})


def test_set_variable_is_inserted_and_an_unset_one_is_recognized(tmp_path: Path) -> None:
    path = _write(tmp_path, "api_key: ${env:SOME_KEY}\n")
    assert load(path, _File, {"SOME_KEY": "abc"}).api_key == "abc"
    assert unset_name(load(path, _File, {}).api_key) == "SOME_KEY"
    assert unset_name("abc") is None
    assert unset_name(None) is None
