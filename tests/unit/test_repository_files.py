"""Files of the project: module docstrings, the lock file, commands in documents, continuous integration."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from headgate import __version__
from headgate.build import this_cpu
from headgate.cli.main import VERBS

pytestmark = pytest.mark.unmeasured

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


def test_every_file_starts_with_a_docstring() -> None:
    """One test for all files: a case for each would take longer than reading it."""
    assert len(FILES) > 100
    texts = {path: path.read_text(encoding="utf-8") for path in FILES}
    without = [
        str(path.relative_to(ROOT))
        for path, text in texts.items()
        if not text.startswith(('"""', 'r"""')) or len((ast.get_docstring(ast.parse(text)) or "").split("\n")[0]) <= 10
    ]
    assert without == []


def _locked() -> dict[str, str]:
    lines = [line for line in LOCK.splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_lock_contains_names_and_versions_only() -> None:
    """It works with every package index: no hashes, hosts or options."""
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


def test_lock_contains_all_requirements_and_no_other_packages() -> None:
    locked = set(_locked())
    required = {canonicalize_name(Requirement(text).name) for text in [*PROJECT["dependencies"], *DEV]}
    for name in locked:
        requirements = [Requirement(text) for text in metadata.requires(name) or ()]
        needed = [wanted for wanted in requirements if wanted.marker is None or wanted.marker.evaluate({"extra": ""})]
        assert {canonicalize_name(wanted.name) for wanted in needed} <= locked, name
        required |= {canonicalize_name(wanted.name) for wanted in requirements}
    assert locked <= required


def test_requirements_have_a_lowest_version() -> None:
    """Except type stubs, which follow their package."""
    for text in [*PROJECT["dependencies"], *DEV]:
        wanted = Requirement(text)
        assert wanted.name.startswith("types-") or any(part.operator == ">=" for part in wanted.specifier), text


def test_version_and_license_agree_with_the_files() -> None:
    assert PROJECT["version"] == __version__
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def test_make_commands_in_documents_exist() -> None:
    named = {
        target
        for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
        for target in re.findall(r"(?:^ {4}|`|\" )make ([a-z-]+)", document.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {"serve", "test"} <= named
    assert named <= _targets()


def test_make_targets_are_phony_and_listed_by_make_help() -> None:
    phony = set(re.findall(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)[0].split())
    assert phony == _targets()
    shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
    for target in sorted(phony - {"ready", "help"}):
        assert f"make {target} " in shown.stdout


def test_headgate_commands_in_documents_exist() -> None:
    later = {"pull", "doctor"}
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = document.read_text(encoding="utf-8")
        for verb in re.findall(r"(?:^ {4}|`|\$\()(?:\.venv/bin/)?headgate ([a-z]+)", text, re.MULTILINE):
            assert verb in VERBS or verb in later, f"{document.name}: headgate {verb}"


def test_continuous_integration_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")


def test_tests_and_benchmarks_print_the_cpu_first() -> None:
    needs = dict(re.findall(r"^([a-z-]+): (\w+)", MAKEFILE, re.MULTILINE))
    long = {name for name in _targets() if name.startswith("bench-")}
    long |= {"test", "cover", "chaos", "fuzz", "soak", "resume-proof", "gpu-check"}
    assert {name: needs[name] for name in long} == dict.fromkeys(long, "machine")
    done = subprocess.run(
        [sys.executable, "-m", "headgate.build"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
    )
    cpu = this_cpu()
    assert done.stdout.startswith(f"CPU: {cpu.model}")
    assert all(feature in done.stdout for feature in cpu.features)
    assert re.search(r", \d+ cores$", done.stdout.strip())
