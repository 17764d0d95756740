"""The explanations that the page of the dashboard has for codes of the gateway."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.routing.chain import Drop

WORDS = Path(__file__).parents[2] / "gateway" / "ui" / "static" / "core" / "words.js"


def test_each_reason_to_skip_a_candidate_has_an_explanation() -> None:
    reasons = re.search(r"export const REASONS = \{(.*?)\n\};", WORDS.read_text(encoding="utf-8"), re.DOTALL)
    assert reasons is not None
    assert set(re.findall(r"^  (\w+):", reasons[1], re.MULTILINE)) == set(Drop)
