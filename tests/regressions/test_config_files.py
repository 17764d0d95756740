"""Problems of configuration files: secrets, depth, size and odd values."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gateway import settings_loading
from headgate.shared.configfile import MAX_BYTES, read_yaml
from headgate.shared.errors import ConfigError, Problem

KEY = "sk-CANARY-0123456789"


def problem_of(folder: Path, text: str, key: str, message: str) -> str:
    """The whole error for a gateway.yaml with `text` in line 2, whose only problem is `message` at `key`."""
    (folder / "gateway.yaml").write_text(f"port: 1234\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        settings_loading.load(folder, {"OPENAI_API_KEY": KEY})
    (problem,) = caught.value.problems
    assert (problem.line, problem.key) == (2, key)
    assert message in problem.message
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("providers: {openai: '${env:OPENAI_API_KEY}'}", "providers.openai", "expected settings as NAME: VALUE"),
        (f"providers: {{openai: {KEY}}}", "providers.openai", "expected settings as NAME: VALUE"),
        ("providers: {openai: {kind: '${env:OPENAI_API_KEY}', api_key: x}}", "providers.openai.kind", "'openai' or"),
        ("providers: {openai: {kind: openai, api_key: 7700770077}}", "providers.openai.api_key", "a valid string"),
        (f"keys: [{KEY}]", "keys.0", "expected settings as NAME: VALUE"),
        (f"keys: {KEY}", "keys", "expected a list"),
        (f"keys: [{{name: a, hash: {KEY}}}]", "keys.0.hash", "write sha256:"),
    ],
)
def test_problem_does_not_repeat_a_value_that_may_be_a_key(tmp_path: Path, text: str, key: str, message: str) -> None:
    error = problem_of(tmp_path, text, key, message)
    assert KEY not in error
    assert "7700770077" not in error


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("breaker: {open: '${env:OPENAI_API_KEY}'}", "breaker.open", "'${env:OPENAI_API_KEY}' is not a duration"),
        ("max_body: 'x${env:OPENAI_API_KEY}'", "max_body", "'x${env:OPENAI_API_KEY}' is not a size"),
        (
            "images: {hosts: [a.org, '${env:OPENAI_API_KEY}!']}",
            "images.hosts",
            "'${env:OPENAI_API_KEY}!' is not a host",
        ),
        ("routes: {a: {chain: ['${env:OPENAI_API_KEY}']}}", "routes.a.chain.0", "'${env:OPENAI_API_KEY}' is not PROV"),
        ("routes: {a: {chain: ['${env:OPENAI_API_KEY}/b']}}", "routes.a.chain.0", "'${env:OPENAI_API_KEY}/b': unknown"),
    ],
)
def test_problem_quotes_the_variable_instead_of_its_value(tmp_path: Path, text: str, key: str, message: str) -> None:
    assert KEY.lower() not in problem_of(tmp_path, text, key, message).lower()


@pytest.mark.parametrize("variable", ["GATEWAY_KEYS", "GATEWAY_PROVIDERS"])
def test_problem_of_a_variable_does_not_repeat_its_value(tmp_path: Path, variable: str) -> None:
    """The environment can contain whole sections."""
    (tmp_path / "gateway.yaml").write_text("{}")
    value = f"[{KEY}]" if variable == "GATEWAY_KEYS" else f"{{openai: {KEY}}}"
    with pytest.raises(ConfigError, match=variable) as caught:
        settings_loading.load(tmp_path, {variable: value})
    assert KEY not in str(caught.value)


def test_problem_repeats_values_that_are_not_secret(tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text(
        "breaker: {failures: many}\nattempts: {max: '${env:NOWHERE}'}\nmax_body: much\n"
    )
    with pytest.raises(ConfigError) as caught:
        settings_loading.load(tmp_path, {})
    first, second, third = sorted(caught.value.problems, key=lambda problem: problem.line or 0)
    assert "'many'" in first.message
    assert "the variable NOWHERE is not set" in second.message
    assert "'much' is not a size" in third.message


def test_pipe_instead_of_a_configuration_file_is_refused_without_opening_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gateway.yaml")
    with pytest.raises(ConfigError, match="this is a pipe; use a file"):
        settings_loading.load(tmp_path, {})


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
MERGES = "a0: &a0 {k0: 1, k1: 2}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 10)
)
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 2000))


def _problem(tmp_path: Path, text: str) -> Problem:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path, {})
    (problem,) = caught.value.problems
    assert problem.file == path
    return problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 20000, "nested too deeply"),
        ("a: " + "{b: " * 500 + "1" + "}" * 500, "nested too deeply"),
        ("\n".join("  " * depth + "k:" for depth in range(300)), "nested too deeply"),
        ("- " * 5000, "nested too deeply"),
        (CHAIN, "nested too deeply"),
        (LAUGHS, "with aliases expanded"),
        (MERGES, "with aliases expanded"),
        ("a: [" + "1," * 200_000 + "]", "keys and values"),
        ("a: &a [*a]", "an alias contains itself"),
        ("a: &a {b: *a}", "an alias contains itself"),
    ],
    ids=["flow", "mappings", "block", "dashes", "chain", "laughs", "merges", "many", "loop", "loop-in-mapping"],
)
def test_file_that_is_too_deep_or_too_large_is_a_problem_with_a_line(tmp_path: Path, text: str, message: str) -> None:
    began = time.process_time()
    problem = _problem(tmp_path, text)
    assert time.process_time() - began < 20
    assert message in problem.message
    assert problem.line is not None


def test_file_beyond_the_size_limit_is_refused_unread(tmp_path: Path) -> None:
    assert "larger than the limit of 4 MB" in _problem(tmp_path, "#" * (MAX_BYTES + 1)).message
    endless = tmp_path / "endless.yaml"
    endless.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="larger than the limit of 4 MB"):
        read_yaml(endless, {})


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("b: 1\n? [a]\n: 2\n", 2, "a key must be text"),
        ("b: 1\na: 2024-13-45\n", 2, "month must be in 1..12"),
        ("b: 1\na: " + "9" * 5000 + "\n", 2, "invalid value"),
        ("b: 1\na: !!int many\n", 2, "invalid value"),
        ("b: 1\na: \x07\n", 2, "not valid YAML: special characters"),
    ],
    ids=["key", "date", "number", "tag", "bell"],
)
def test_invalid_keys_and_values_are_problems_with_their_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    problem = _problem(tmp_path, text)
    assert problem.line == line
    assert message in problem.message


def test_aliases_and_merges_are_read(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("base: &base {context: 1, parallel: 2}\nmine: {<<: *base, parallel: 4}\nlist: [*base, *base]\n")
    data, _ = read_yaml(path, {})
    assert data["mine"] == {"context": 1, "parallel": 4}
    assert data["list"] == [data["base"], data["base"]]
