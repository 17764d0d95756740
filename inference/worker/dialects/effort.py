"""How much to reason, in the words of a family's templates; decides no default and never reads an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""From least to most."""

_NEAREST: Mapping[str, Mapping[str, str]] = {
    "harmony": {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"},
}
"""Levels that a family was not trained on, as the nearest that it was: gpt-oss always reasons, at three levels."""


def effort_variables(level: str, family: str) -> dict[str, Any]:
    """What a template of `family` is told of one of LEVELS: the level, or that thinking is on or off."""
    known = _NEAREST.get(family, {}).get(level, level)
    thinks = known != "none"
    return {"enable_thinking": thinks, "thinking": thinks, **({"reasoning_effort": known} if thinks else {})}
