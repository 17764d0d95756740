"""Writes requirements.lock: what headgate and its `dev` extra need, as installed here; chooses no version itself.

Names and versions only: no hashes and no hosts, so that the lock serves whatever package index a machine uses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HEADER = "# What headgate and its tests run with. `make lock` writes this file from what is installed in .venv.\n"
PROJECT = "headgate"
EXTRA = "dev"


def needed(project: str = PROJECT, extra: str = EXTRA) -> dict[str, str]:
    """Every package that `project[extra]` needs here, transitively, with its installed version.

    Raises importlib.metadata.PackageNotFoundError when one is not installed.
    """
    found: dict[str, str] = {}
    frontier = [Requirement(f"{project}[{extra}]")]
    seen: set[tuple[str, frozenset[str]]] = set()
    while frontier:
        wanted = frontier.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in seen:
            continue
        seen.add(key)
        found[key[0]] = metadata.version(wanted.name)
        frontier += _requirements(wanted)
    del found[project]
    return found


def _requirements(wanted: Requirement) -> Iterator[Requirement]:
    for text in metadata.requires(wanted.name) or ():
        inner = Requirement(text)
        if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in {"", *wanted.extras}):
            yield inner


def render(versions: dict[str, str]) -> str:
    """The lock's text: one `name==version` per line, sorted; a local part of a version (`+cpu`) is left out."""
    lines = (f"{name}=={version.partition('+')[0]}\n" for name, version in sorted(versions.items()))
    return HEADER + "".join(lines)


def main() -> int:
    """Writes the lock beside pyproject.toml."""
    path = Path(__file__).resolve().parents[1] / "requirements.lock"
    versions = needed()
    path.write_text(render(versions), encoding="utf-8")
    print(f"{path}: {len(versions)} packages", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
