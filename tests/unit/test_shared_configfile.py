"""Configuration files: problems have file, line and advice."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from headgate.shared.configfile import Duration, load, unset_name
from headgate.shared.errors import ConfigError


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


def test_secrets_come_from_the_environment(tmp_path: Path) -> None:
    path = _write(tmp_path, "api_key: ${env:SOME_KEY}\n")
    assert load(path, _File, {"SOME_KEY": "abc"}).api_key == "abc"
    assert unset_name(load(path, _File, {}).api_key) == "SOME_KEY"
    assert unset_name("abc") is None
    assert unset_name(None) is None
