"""Which package may import which, read from the source: pure cores, one wire module, no driver in a service."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "inference", "headgate")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

IMPURE = {
    "asyncio", "httpx", "httpx2", "aiohttp", "fastapi", "starlette", "uvicorn", "time", "random", "os", "subprocess",
    "threading", "multiprocessing", "socket", "logging", "secrets", "pynvml", "llama_cpp",
}  # fmt: skip
"""What a core may not import: clocks, chance, the network, processes, logs, devices."""

NATIVE = {"llama_cpp", "pynvml"}
NATIVE_HOMES = ("inference/worker/", "inference/helper", "inference/jobs/", "inference/tools/demo_check.py")
"""What runs in processes that may map a compute driver: workers, short-lived helpers, a script of the demo models."""


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _imports(path: Path) -> tuple[tuple[str, int], ...]:
    """Every module a file imports, absolute, with the line; `from a import b` counts as `a` and as `a.b`."""
    return tuple(_read_imports(path))


def _read_imports(path: Path) -> Iterator[tuple[str, int]]:
    here = _module(path).split(".")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = here if path.name == "__init__.py" else here[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            yield base, node.lineno
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def _outside(path: Path, allowed: tuple[str, ...], package: str) -> list[str]:
    """Imports of `package` in `path` that are neither one of `allowed` nor something inside one."""
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for name, line in _imports(path)
        if (name == package or name.startswith(package + "."))
        and not any(name == entry or name.startswith(entry + ".") for entry in allowed)
        and name != package
    ]


AUTHORITY = {"placement", "lifecycle", "pressure", "device_health", "warm", "quarantine"}
"""The policies of the authority: the packages below `inference/authority`, pure like a core."""


def _is_core(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts[:-1]
    return "core" in parts or (parts[:2] == ("inference", "authority") and bool(AUTHORITY & {*parts}))


CORES = [path for path in FILES if _is_core(path)]


def test_cores_are_pure() -> None:
    """A core decides from its arguments alone: it imports no clock, no chance, no network, no process, no log."""
    assert _imported_by_cores(lambda name: name.partition(".")[0] in IMPURE) == []


def test_cores_import_no_shell_of_their_package() -> None:
    """A core knows cores, the wire types, error trees and the pure shared rooms; never a module that awaits."""
    shells = {
        _module(other)
        for other in FILES
        if other not in CORES and any(name.partition(".")[0] == "asyncio" for name, _ in _imports(other))
    }
    assert _imported_by_cores(lambda name: name in shells) == []


def _imported_by_cores(unwanted: Callable[[str], bool]) -> list[str]:
    """What is imported by cores and unwanted, with its place."""
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in CORES
        for name, line in _imports(path)
        if unwanted(name)
    ]


def test_there_are_cores_to_look_at() -> None:
    """The two tests above look at something in each service."""
    homes = {path.relative_to(ROOT).parts[0] for path in CORES}
    assert homes == {"gateway", "inference"}


def test_the_gateway_knows_only_the_wire_types_of_inference() -> None:
    found = [
        line for path in FILES if path.is_relative_to(ROOT / "gateway")
        for line in _outside(path, ("inference.protocol",), "inference")
    ]  # fmt: skip
    assert found == []


def test_inference_knows_nothing_of_the_gateway() -> None:
    found = [
        line for path in FILES if path.is_relative_to(ROOT / "inference") for line in _outside(path, (), "gateway")
    ]
    assert found == []


def test_the_wire_types_import_the_standard_library_only() -> None:
    roots = {name.partition(".")[0] for name, _ in _imports(ROOT / "inference" / "protocol.py")}
    assert roots - set(sys.stdlib_module_names) == set()


def test_only_workers_and_helpers_name_a_compute_library() -> None:
    """Neither service ever maps llama.cpp or NVML, so neither may import their bindings."""
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in FILES
        if not str(path.relative_to(ROOT)).startswith(NATIVE_HOMES)
        for name, line in _imports(path)
        if name.partition(".")[0] in NATIVE
    ]
    assert found == []


def test_shared_rooms_know_no_service() -> None:
    found = [
        line
        for path in (ROOT / "headgate" / "shared").glob("*.py")
        for package in ("gateway", "inference", "headgate.cli")
        for line in _outside(path, (), package)
    ]
    assert found == []
