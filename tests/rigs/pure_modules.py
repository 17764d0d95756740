"""Lists the pure modules: the sources of the import-linter contract `pure` in pyproject.toml.

    python -m tests.rigs.pure_modules        # prints a configuration of coverage.py that measures these files only

Files and not module names: coverage imports the packages of module names, and numpy cannot be imported a second time.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def pure_modules() -> list[str]:
    """Dotted names of modules, and of packages whose modules are all pure."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (pure,) = (contract for contract in project["tool"]["importlinter"]["contracts"] if contract["id"] == "pure")
    return [name.removesuffix(".**").removesuffix(".*") for name in pure["source_modules"]]


def files() -> list[str]:
    """The files of the pure modules, as patterns relative to the repository."""
    paths = [name.replace(".", "/") for name in pure_modules()]
    return [f"{path}/*" if (ROOT / path).is_dir() else f"{path}.py" for path in paths]


def importable() -> list[str]:
    """Dotted names of all pure modules."""
    found = (module for path in files() for module in ROOT.glob(path.replace("/*", "/**/*.py")))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in found]


if __name__ == "__main__":
    sys.stdout.write("".join(["[run]\nbranch = true\ninclude =\n", *(f"    {name}\n" for name in files())]))
