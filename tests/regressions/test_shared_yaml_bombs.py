"""Files too deep or too large for Python ended in a RecursionError, or never; odd keys and dates in a TypeError."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headgate.shared.configfile import MOST_BYTES, read_yaml
from headgate.shared.errors import ConfigError, Problem

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
    ("text", "said"),
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
def test_what_is_too_deep_or_too_much_is_a_problem_with_a_line(tmp_path: Path, text: str, said: str) -> None:
    began = time.process_time()
    problem = _problem(tmp_path, text)
    assert time.process_time() - began < 20
    assert said in problem.message
    assert problem.line is not None


def test_a_file_too_large_is_refused_unread(tmp_path: Path) -> None:
    assert "larger than the limit of 4 MB" in _problem(tmp_path, "#" * (MOST_BYTES + 1)).message
    endless = tmp_path / "endless.yaml"
    endless.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="larger than the limit of 4 MB"):
        read_yaml(endless, {})


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("b: 1\n? [a]\n: 2\n", 2, "a key must be text"),
        ("b: 1\na: 2024-13-45\n", 2, "month must be in 1..12"),
        ("b: 1\na: " + "9" * 5000 + "\n", 2, "invalid value"),
        ("b: 1\na: !!int many\n", 2, "invalid value"),
        ("b: 1\na: \x07\n", 2, "not valid YAML: special characters"),
    ],
    ids=["key", "date", "number", "tag", "bell"],
)
def test_odd_keys_and_values_are_problems_with_their_line(tmp_path: Path, text: str, line: int, said: str) -> None:
    problem = _problem(tmp_path, text)
    assert problem.line == line
    assert said in problem.message


def test_honest_aliases_and_merges_still_work(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("base: &base {context: 1, parallel: 2}\nmine: {<<: *base, parallel: 4}\nlist: [*base, *base]\n")
    data, _ = read_yaml(path, {})
    assert data["mine"] == {"context": 1, "parallel": 4}
    assert data["list"] == [data["base"], data["base"]]
