"""What a stranger relies on: first lines, the lock, the README's commands, continuous integration."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from headgate import __version__
from headgate.machine import this_cpu

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path
    for folder in ("gateway", "inference", "headgate", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if path.stat().st_size
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEV = PROJECT["optional-dependencies"]["dev"]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def _lack(path: Path) -> str | None:
    """What the beginning of a file lacks, or None."""
    text = path.read_text(encoding="utf-8")
    said = ast.get_docstring(ast.parse(text))
    if not said:
        return "a module docstring is needed"
    if not text.startswith(('"""', 'r"""')):
        return "it stands in the first line"
    return None if len(said.splitlines()[0]) > 10 else "it says more than that"


def test_every_file_says_in_its_first_line_what_it_is_for() -> None:
    """One test for all of them: a case for every file costs more than reading it."""
    lacks = {str(path.relative_to(ROOT)): lack for path in FILES if (lack := _lack(path))}
    assert len(FILES) > 100
    assert lacks == {}


def _locked() -> dict[str, str]:
    lines = [line for line in LOCK.splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_lock_holds_names_and_versions_only() -> None:
    """It has no hashes, hosts or options, so that it works with every package index."""
    lines = [line for line in LOCK.splitlines() if line and not line.startswith("#")]
    names = [line.partition("==")[0] for line in lines]
    assert names == sorted(names)
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)] == []


def test_lock_satisfies_the_requirements_of_the_project() -> None:
    locked = _locked()
    for text in [*PROJECT["dependencies"], *DEV]:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate():
            assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), text


def test_lock_is_closed_under_requirements() -> None:
    """Each requirement of a locked package is locked, and each locked package is required by another or the project."""
    locked = set(_locked())
    required = {canonicalize_name(Requirement(text).name) for text in [*PROJECT["dependencies"], *DEV]}
    for name in locked:
        requirements = [Requirement(text) for text in metadata.requires(name) or ()]
        needed = [wanted for wanted in requirements if wanted.marker is None or wanted.marker.evaluate({"extra": ""})]
        assert {canonicalize_name(wanted.name) for wanted in needed} <= locked, name
        required |= {canonicalize_name(wanted.name) for wanted in requirements}
    assert locked <= required


def test_ranges_have_a_floor() -> None:
    """A dependency without a lowest version promises what was never tried; type stubs follow their package."""
    for text in [*PROJECT["dependencies"], *DEV]:
        wanted = Requirement(text)
        assert wanted.name.startswith("types-") or any(part.operator == ">=" for part in wanted.specifier), text


def test_one_version_everywhere() -> None:
    assert PROJECT["version"] == __version__


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def test_every_make_command_in_the_docs_exists() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    asked = {
        target
        for document in documents
        for target in re.findall(r"(?:^ {4}|`|\" )make ([a-z-]+)", document.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {"serve", "test"} <= asked
    assert asked <= _targets()


def test_every_target_is_phony_and_the_help_names_those_for_people() -> None:
    phony = set(re.findall(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)[0].split())
    assert phony == _targets()
    shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
    for target in sorted(phony - {"ready", "help"}):
        assert f"make {target} " in shown.stdout


def test_every_command_of_the_readme_exists() -> None:
    """`headgate VERB` anywhere in the documents is a verb of the command line."""
    from headgate.cli.main import VERBS

    later = {"pull", "doctor"}
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = document.read_text(encoding="utf-8")
        for verb in re.findall(r"(?:^ {4}|`|\$\()(?:\.venv/bin/)?headgate ([a-z]+)", text, re.MULTILINE):
            assert verb in VERBS or verb in later, f"{document.name}: headgate {verb}"


def test_continuous_integration_runs_the_readmes_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")


def test_the_license_is_there() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_tests_and_benchmarks_begin_with_the_cpu() -> None:
    """A figure or a failure says on which CPU it came about."""
    needs = dict(re.findall(r"^([a-z-]+): (\w+)", MAKEFILE, re.MULTILINE))
    long = {name for name in _targets() if name.startswith("bench-")}
    long |= {"test", "cover", "chaos", "fuzz", "soak", "resume-proof", "gpu-check"}
    assert {name: needs[name] for name in long} == dict.fromkeys(long, "machine")
    done = subprocess.run(
        [sys.executable, "-m", "headgate.machine"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
    )
    cpu = this_cpu()
    assert done.stdout.startswith(f"CPU: {cpu.model}")
    assert all(feature in done.stdout for feature in cpu.features)
    assert re.search(r", \d+ cores$", done.stdout.strip())
