"""Configuration mistakes become file, line and advice; nothing is guessed and nothing is applied."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from headgate.shared.configfile import load, unset_name
from headgate.shared.errors import ConfigError
from headgate.shared.units import Duration


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


def test_a_good_file_is_read(tmp_path: Path) -> None:
    path = _write(tmp_path, "models:\n  a/b:\n    context_length: 128\n    idle_timeout: 5m\n")
    read = load(path, _File, {})
    assert read.models["a/b"].context_length == 128
    assert read.models["a/b"].idle_timeout == 300


def test_an_empty_mapping_is_all_defaults(tmp_path: Path) -> None:
    assert load(_write(tmp_path, "{}"), _File, {}) == _File()


def test_an_unknown_key_names_its_line_and_the_near_one(tmp_path: Path) -> None:
    path = _write(tmp_path, "models:\n  demo:\n    context_lenght: 128\n")
    with pytest.raises(ConfigError) as caught:
        load(path, _File, {})
    (problem,) = caught.value.problems
    assert (problem.file, problem.line, problem.key) == (path, 3, "models.demo.context_lenght")
    assert "did you mean 'context_length'?" in problem.message


def test_every_problem_is_told_not_only_the_first(tmp_path: Path) -> None:
    path = _write(tmp_path, "modles: {}\nmodels:\n  demo:\n    context_length: lots\n    idle_timeout: soon\n")
    with pytest.raises(ConfigError) as caught:
        load(path, _File, {})
    assert [problem.line for problem in caught.value.problems] == [4, 5, 1]
    assert "'lots'" in str(caught.value)
    assert "30s" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("models: [\n", 2, "expected"),
        ("models: {}\nmodels: {}\n", 2, "duplicate key"),
        ("- a\n", 1, "NAME: VALUE"),
        ("models: {}\n---\nmodels: {}\n", 2, "a second YAML document begins here"),
        ("a: !!python/object:os.system {}\n", 1, "could not determine a constructor"),
    ],
)
def test_broken_yaml_is_a_problem_with_a_line(tmp_path: Path, text: str, line: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(_write(tmp_path, text), _File, {})
    (problem,) = caught.value.problems
    assert problem.line == line
    assert said in problem.message


def test_a_missing_file_and_a_binary_file_are_problems(tmp_path: Path) -> None:
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
