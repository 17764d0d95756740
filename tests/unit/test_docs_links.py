"""Every file that a document names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_NAMED = re.compile(r"\bdocs/[a-z-]+\.md\b")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    links = [link for link in _LINK.findall(document.read_text()) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_documents_named_in_configuration_and_units_exist() -> None:
    named = {
        name for path in (ROOT / "config").rglob("*") if path.is_file() for name in _NAMED.findall(path.read_text())
    }
    assert named, "the configuration points to its documentation"
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
