"""The core of the gateway imported its frame types from the provider seam, which belongs to the shell."""

from __future__ import annotations

import re
from pathlib import Path

CORE = Path(__file__).resolve().parents[2] / "gateway" / "core"


def test_the_core_imports_only_itself_the_errors_and_the_wire_types() -> None:
    found = {
        (path.name, name)
        for path in CORE.glob("*.py")
        for name in re.findall(r"^from (gateway[\w.]*) import|^import (gateway[\w.]*)", path.read_text(), re.MULTILINE)
        for name in name
        if name and not re.fullmatch(r"gateway\.core(\.\w+)?|gateway\.errors", name)
    }
    assert found == set()
