"""A key in the wrong place of a configuration stood in the message about it, and so in the log of every reload."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway import settings
from headgate.shared.errors import ConfigError

KEY = "sk-CANARY-0123456789"


def problem_of(place: Path, text: str, where: str, said: str) -> str:
    """All that is told of a gateway.yaml with `text` in its second line, whose one problem is `said` of `where`."""
    (place / "gateway.yaml").write_text(f"port: 1234\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        settings.load(place, {"OPENAI_API_KEY": KEY})
    (problem,) = caught.value.problems
    assert (problem.line, problem.key) == (2, where)
    assert said in problem.message
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "where", "said"),
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
def test_a_problem_says_where_and_what_and_no_secret(tmp_path: Path, text: str, where: str, said: str) -> None:
    """Written out or taken from a variable, a value that may be a key is not repeated."""
    told = problem_of(tmp_path, text, where, said)
    assert KEY not in told
    assert "7700770077" not in told


@pytest.mark.parametrize(
    ("text", "where", "said"),
    [
        ("breaker: {open: '${env:OPENAI_API_KEY}'}", "breaker.open", "'${env:OPENAI_API_KEY}' is not a duration"),
        ("max_body: 'x${env:OPENAI_API_KEY}'", "max_body", "'x${env:OPENAI_API_KEY}' is not a size"),
        ("images: {hosts: [a.org, '${env:OPENAI_API_KEY}!']}", "images.hosts", "'${env:OPENAI_API_KEY}!' is no name"),
        ("routes: {a: {chain: ['${env:OPENAI_API_KEY}']}}", "routes.a.chain.0", "'${env:OPENAI_API_KEY}' is not PROV"),
        ("routes: {a: {chain: ['${env:OPENAI_API_KEY}/b']}}", "routes.a.chain.0", "'${env:OPENAI_API_KEY}/b': no prov"),
    ],
)
def test_a_problem_shows_the_variable_and_not_its_value(tmp_path: Path, text: str, where: str, said: str) -> None:
    """Our own messages quote what is wrong, and so the value, in lower case too."""
    told = problem_of(tmp_path, text, where, said)
    assert KEY.lower() not in told.lower()


@pytest.mark.parametrize("variable", ["GATEWAY_KEYS", "GATEWAY_PROVIDERS"])
def test_nor_does_one_about_a_variable(tmp_path: Path, variable: str) -> None:
    """Whole sections can be given by the environment; their mistakes are told the same way."""
    (tmp_path / "gateway.yaml").write_text("{}")
    value = f"[{KEY}]" if variable == "GATEWAY_KEYS" else f"{{openai: {KEY}}}"
    with pytest.raises(ConfigError, match=variable) as caught:
        settings.load(tmp_path, {variable: value})
    assert KEY not in str(caught.value)


def test_what_is_no_secret_is_still_repeated(tmp_path: Path) -> None:
    """A person looks for it in the file; a variable that is not set is named."""
    (tmp_path / "gateway.yaml").write_text(
        "breaker: {failures: many}\nattempts: {max: '${env:NOWHERE}'}\nmax_body: much\n"
    )
    with pytest.raises(ConfigError) as caught:
        settings.load(tmp_path, {})
    first, second, third = sorted(caught.value.problems, key=lambda problem: problem.line or 0)
    assert "'many'" in first.message
    assert "the variable NOWHERE is not set" in second.message
    assert "'much' is not a size" in third.message


def test_a_pipe_in_the_place_of_a_file_is_a_problem(tmp_path: Path) -> None:
    """To open it would wait for somebody to write, and nobody does."""
    os.mkfifo(tmp_path / "gateway.yaml")
    with pytest.raises(ConfigError, match="this is a pipe; use a file"):
        settings.load(tmp_path, {})
