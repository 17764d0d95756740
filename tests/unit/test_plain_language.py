"""Words that must not occur in the product's text: personal pronouns for programs and requests, and private terms.

`docs/glossary.md` has the terms to use instead.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.unmeasured

ROOT = Path(__file__).resolve().parents[2]

FORBIDDEN = re.compile(
    r"\b(whoever|whom|somebody|someone|nobody|everybody|everyone|anybody|said|told|heard"
    r"|so many|so manieth|speaks? against|gone home|in vain|by and by|wordless)\b",
    re.IGNORECASE,
)
PERSONAL = re.compile(r"\bwho\b", re.IGNORECASE)
"""Fine in a document about people, not in code."""

SUFFIXES = (".py", ".md", ".yaml", ".toml", "")
DATA = ("inference/demo/", "tests/unit/golden/", "LICENSE")


def _lines() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if (
            path == Path(__file__).resolve()
            or path.suffix not in SUFFIXES
            or name.startswith(DATA)
            or not path.is_file()
        ):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{name}:{number}"
            for number, line in enumerate(text.splitlines(), 1)
            if FORBIDDEN.search(line) or (path.suffix == ".py" and PERSONAL.search(line))
        ]
    return found


def test_no_line_has_a_forbidden_word() -> None:
    assert _lines() == []
