"""Files and links in documents exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")
_NAMED = re.compile(r"\bdocs/[a-z-]+\.md\b")
_PATH = re.compile(r"`((?:gateway|inference|headgate|tests|benchmarks|config|docker|docs)/[\w./*-]*)`")
RESULTS = "benchmarks/results/"
"""Written by the benchmarks, not part of the repository."""


def _anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_have_a_target(document: Path) -> None:
    wrong = []
    for link, anchor in _LINK.findall(document.read_text(encoding="utf-8")):
        target = document.parent / link if link else document
        if "://" not in link and (not target.exists() or (anchor and anchor not in _anchors(target))):
            wrong.append(f"{link}#{anchor}")
    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_in_documents_exist(document: Path) -> None:
    """`path/file.py`, `path/` and patterns such as `path/*.py` in backticks."""
    named = set(_PATH.findall(document.read_text(encoding="utf-8")))
    assert sorted(name for name in named if not name.startswith(RESULTS) and not [*ROOT.glob(name)]) == []


def test_documents_named_in_configuration_and_units_exist() -> None:
    named = {
        name for path in (ROOT / "config").rglob("*") if path.is_file() for name in _NAMED.findall(path.read_text())
    }
    assert named, "the configuration refers to its documentation"
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
