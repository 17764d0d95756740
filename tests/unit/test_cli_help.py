"""Help texts: their imports, their copy in the documentation, advice for mistakes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from headgate import bootstrap
from headgate.cli.main import VERBS, main
from headgate.cli.reference import DOCUMENT, rewritten

HEAVY = ["fastapi", "uvicorn", "openai", "anthropic", "aiohttp", "httpx2", "llama_cpp"]
NOT_FOR_THE_OVERVIEW = [*HEAVY, "pydantic", "yaml", "asyncio", "http.client", "gateway", "inference"]


def test_documentation_contains_the_current_help() -> None:
    """`make reference` updates the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == rewritten(text)


def test_documentation_explains_common_options_once() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    explained, _, shown = text.partition("<!-- help: begin")
    assert all(f"`{option}" in explained for option in ("-h", "--config-dir", "--json"))
    assert "print data as JSON" not in shown
    assert "options:\n\n" not in shown
    assert "--inference-port PORT  port of the inference service" in shown


@pytest.mark.parametrize(
    ("commands", "banned"),
    [
        ([["--help"], ["--version"]], NOT_FOR_THE_OVERVIEW),
        ([[verb, "--help"] for verb in VERBS], HEAVY),
    ],
    ids=["overview", "verbs"],
)
def test_help_does_not_import_slow_packages(commands: list[list[str]], banned: list[str]) -> None:
    """The commands are run in one process, one after the other."""
    script = (
        "import sys; from headgate.cli.main import main\n"
        f"for words in {commands!r}:\n"
        "    main(words)\n"
        f"    assert not [name for name in {banned!r} if name in sys.modules], words"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_the_common_options(verb: str, capsys: Any) -> None:
    assert main(["help", verb]) == 0
    output = capsys.readouterr().out
    if verb in (actions := {"config": "check", "key": "show", "kv": "list", "ray": "up"}):
        assert main([verb, actions[verb], "--help"]) == 0
        output = capsys.readouterr().out
    assert "--config-dir DIR" in output
    assert "--json" in output


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["frobnicate"], "`headgate --help` lists the verbs"),
        (["lsit"], "did you mean `headgate list`?"),
        (["--port", "1"], "unknown option '--port'"),
        (["show"], "the following arguments are required: MODEL"),
        (["config"], "the following arguments are required: ACTION"),
        (["up", "--port", "many"], "invalid int value: 'many'"),
    ],
)
def test_mistake_gives_exit_code_2_and_advice(words: list[str], advice: str, capsys: Any) -> None:
    assert main(words) == 2
    output = capsys.readouterr().err
    assert advice in output
    assert "Traceback" not in output


def test_empty_command_line_prints_the_help_as_a_usage_error(capsys: Any) -> None:
    assert main([]) == 2
    assert "start:" in capsys.readouterr().out


def test_closed_output_pipe_is_no_error() -> None:
    """`headgate config schema | head -1` prints no error."""
    result = subprocess.run(
        f"{sys.executable} -m headgate config schema | head -1", shell=True, capture_output=True, text=True, timeout=20
    )
    assert result.stderr == ""


def test_windows_is_refused_with_an_alternative(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert main(["ps"]) == 2
    assert "Windows is not supported" in capsys.readouterr().err
    assert bootstrap.main() == 1
    assert "use WSL 2" in capsys.readouterr().err
