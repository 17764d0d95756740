"""Template variables for the requested reasoning effort."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Lowest first."""

_NEAREST: Mapping[str, Mapping[str, str]] = {
    "harmony": {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"},
}
"""The nearest known level for other levels: gpt-oss always reasons, at three levels."""


def effort_variables(level: str, family: str) -> dict[str, Any]:
    """The template variables of `family` for one of LEVELS: the level, and whether thinking is on."""
    known = _NEAREST.get(family, {}).get(level, level)
    thinks = known != "none"
    return {"enable_thinking": thinks, "thinking": thinks, **({"reasoning_effort": known} if thinks else {})}
