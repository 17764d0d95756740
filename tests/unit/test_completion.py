"""`headgate completion`: the scripts know every verb, action and option, and bash offers the right words."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headgate.cli.first_steps import completion
from headgate.cli.main import GROUPS, main
from tests.rigs.processes import forget_own

EVERY = completion.levels()
BASH = shutil.which("bash")


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_script_has_every_verb_action_and_option(shell: str, capsys: Any) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for group in GROUPS.values():
        assert all(verb.name in script for verb in group)
    assert {"config import", "kv pin", "key new"} <= {level.path for level in EVERY}
    for level in EVERY:
        flags = [flag for option in level.options for flag in option.flags]
        assert "--json" in flags or " " not in level.path
        assert all((flag if shell != "fish" else flag.lstrip("-")) in script for flag in flags)
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True, timeout=10)


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
def test_bash_offers_verbs_options_values_models_and_files(tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").write_text("")
    (tmp_path / "script").write_text(completion.bash(completion.verbs(), EVERY))
    words = {
        ("pl",): "plan",
        ("plan", ""): "m1 m2",
        ("plan", "--kv-type", ""): "f16 q8_0 q4_0",
        ("plan", "--kv-c"): "--kv-cells",
        ("plan", "--ctx", ""): "",
        ("config", "s"): "show schema",
        ("config", "schema", "m"): "models",
        ("key", "new", "--a"): "--admin",
        ("add", "mi"): "mine.gguf",
        ("completion", ""): "bash zsh fish",
    }
    lines = ["source ./script", "headgate() { echo 'm1 m2'; }"]
    for typed in words:
        quoted = " ".join(f"'{word}'" for word in ("headgate", *typed))
        lines.append(f'COMP_WORDS=({quoted}); COMP_CWORD={len(typed)}; _headgate; echo "${{COMPREPLY[*]}}"')
    argv = [str(BASH), "--norc", "-c", "\n".join(lines)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, cwd=tmp_path, check=True)
    assert dict(zip(words, done.stdout.splitlines(), strict=True)) == words
    assert done.stderr == ""


def test_names_of_models_come_from_the_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    forget_own(monkeypatch)
    monkeypatch.setenv("HEADGATE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("HEADGATE_LOCK_DIR", str(tmp_path))
    monkeypatch.setenv("HEADGATE_CONFIG_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.yaml").write_text("models:\n  b: {path: bundled:demo, aliases: [a]}\n")
    assert main(["completion", "--models"]) == 0
    assert capsys.readouterr().out == "a\nb\n"
    (tmp_path / "models.yaml").write_text("wrong")
    assert main(["completion", "--models"]) == 0
    assert capsys.readouterr() == ("\n", "")
    assert main(["completion"]) == 2
    assert "name the shell: bash, zsh, fish" in capsys.readouterr().err
