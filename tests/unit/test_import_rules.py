"""Import rules that import-linter cannot state (`make lint` checks the others, in pyproject.toml)."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.rigs.pure_modules import pure_modules

pytestmark = pytest.mark.unmeasured

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "inference", "headgate")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

NATIVE = {"llama_cpp", "pynvml"}
NATIVE_FILES = "_job.py"
"""Compute libraries belong to workers, to the jobs of helper processes, and to tools."""


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """The modules that a file imports, with the line; `from a import b` counts as `a` and as `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            yield node.module or "", node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def test_wire_types_import_the_standard_library_only() -> None:
    roots = {name.partition(".")[0] for name, _ in _imports(ROOT / "inference" / "protocol.py")}
    assert roots - set(sys.stdlib_module_names) == set()


def test_only_workers_and_helper_jobs_import_a_compute_library() -> None:
    """Neither service maps llama.cpp or NVML into its process."""
    found = [
        f"{name}:{line} imports {module}"
        for path in FILES
        if not (name := str(path.relative_to(ROOT))).startswith(("inference/worker/", "inference/tools/"))
        and not (name.startswith("inference/") and name.endswith(NATIVE_FILES))
        for module, line in _imports(path)
        if module.partition(".")[0] in NATIVE
    ]
    assert found == []


def test_ray_is_imported_only_when_a_function_needs_it() -> None:
    """`headgate ray --help` and the checks of its arguments work without it."""
    top_level = [
        f"{path.name}:{node.lineno}"
        for path in (ROOT / "headgate" / "ray_cluster").glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and "ray" in {(getattr(node, "module", None) or alias.name).partition(".")[0] for alias in node.names}
    ]
    assert top_level == []


def test_pure_modules_exist() -> None:
    """A renamed module stays in the list of pure modules."""
    missing = [
        name for name in pure_modules()
        if not (ROOT / name.replace(".", "/")).is_dir() and not (ROOT / f"{name.replace('.', '/')}.py").is_file()
    ]  # fmt: skip
    assert missing == []


def test_file_names_are_unique() -> None:
    names = Counter(path.name for path in FILES if not path.name.startswith("__"))
    twice = {name for name, count in names.items() if count > 1}
    assert twice == TWICE


def test_packages_stay_small() -> None:
    sizes = Counter(str(path.parent.relative_to(ROOT)) for path in FILES if path.name != "__init__.py")
    assert {name for name, count in sizes.items() if count > MAX_FILES} == set()


MAX_FILES = 16
TWICE = {"app.py", "errors.py", "settings.py"}
"""The same role in both services."""


SHELL = "inference.authority.shell"
AUTHORITY = ROOT / "inference" / "authority"


def test_only_the_api_imports_the_shell_of_the_authority() -> None:
    """Decisions and views get the state."""
    found = [
        name
        for path in FILES
        if any(module.startswith(SHELL) for module, _ in _imports(path))
        and not (name := str(path.relative_to(ROOT))).startswith("inference/api/")
        and name != "inference/app.py"
    ]
    assert found == []


def test_only_the_shell_assigns_the_state_of_the_authority() -> None:
    package = ROOT / "inference"
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for item in (target.elts if isinstance(target, ast.Tuple) else [target])
        if isinstance(item, ast.Attribute) and item.attr == "_state" and AUTHORITY in path.parents
    }
    assert found <= {"authority/shell.py", "authority/handlers/watching/predictions.py"}


def test_no_module_is_part_of_an_import_cycle() -> None:
    """Imports under `TYPE_CHECKING` and inside functions count."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    try:
        TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()
    except CycleError as error:
        raise AssertionError(f"import cycle: {' -> '.join(error.args[1])}") from None
