"""The markers of a family's reasoning, the place of an answer relative to them, and the requested effort."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from inference.worker.dialects.forms import AnyText, Form, Marker, Regex, Repeat, Sequence

_BREAK = Regex(r"[\n ]{0,2}")
"""Text between reasoning and answer: at most an empty line."""


TEXT_BEGUN = "\uffff"
"""Added to the end of `opened` if text has begun after the marker: the answer continues this text, and its white space
is kept. It is not a valid character, so that no template writes it."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """The two markers of reasoning. White space on both sides of each belongs to the marker."""

    begin: str
    end: str

    def place(self, opened: str) -> Literal["before", "inside", "after"]:
        """Where an answer to a prompt that ends in `opened` begins.

        Only the end counts: earlier markers belong to earlier turns or to texts of users.
        """
        end = opened.removesuffix(TEXT_BEGUN).rstrip()
        if end.endswith(self.begin):
            return "inside"
        return "after" if end.endswith(self.end) else "before"

    def first(self, form: Form, opened: str) -> Form:
        """`form` after reasoning, which is required if the prompt has begun it and optional otherwise."""
        place = self.place(opened)
        rest = (AnyText((self.end,)), Marker(self.end), _BREAK)
        if place == "inside":
            return Sequence((*rest, form))
        if place == "after":
            return form
        return Sequence((Repeat(Sequence((Marker(self.begin), *rest)), 0, 1), form))


TAGS = Thinking("<think>", "</think>")
BRACKETS = Thinking("[THINK]", "[/THINK]")


def thinking_of(template: str, control_texts: Collection[str]) -> Thinking | None:
    """The reasoning markers of a template or a vocabulary."""
    for thinking in (BRACKETS, TAGS):
        if thinking.end in template or thinking.end in control_texts:
            return thinking
    return None


EFFORT_LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Lowest first."""

_NEAREST: Mapping[str, Mapping[str, str]] = {
    "harmony": {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"},
}
"""The nearest known level for other levels: gpt-oss always reasons, at three levels."""


def effort_variables(level: str, family: str) -> dict[str, Any]:
    """The template variables of `family` for one of EFFORT_LEVELS: the level, and whether thinking is on."""
    known = _NEAREST.get(family, {}).get(level, level)
    thinks = known != "none"
    return {"enable_thinking": thinks, "thinking": thinks, **({"reasoning_effort": known} if thinks else {})}
