"""docs/api.md names every field of an explain record."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from gateway.routing.explain_record import Broke, Record, Tried

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "api.md"


@pytest.mark.parametrize("part", [Record, Tried, Broke], ids=lambda part: part.__name__)
def test_explain_record_fields_are_documented(part: type) -> None:
    """A renamed or new field is renamed or added in the table."""
    section = DOCUMENT.read_text(encoding="utf-8").partition("### Explain records\n")[2].partition("\n### ")[0]
    documented = set(re.findall(r"`(\w+)`", section))
    assert sorted({field.name for field in fields(part)} - documented) == []
