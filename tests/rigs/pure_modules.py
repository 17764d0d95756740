"""Lists the pure modules: the sources of the import-linter contract `pure` in pyproject.toml.

python -m tests.rigs.pure_modules        # prints an option of pytest-cov per line: a file of arguments
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


if __name__ == "__main__":
    sys.stdout.write("".join(f"--cov={name}\n" for name in pure_modules()))
