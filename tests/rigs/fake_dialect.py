"""A dialect of single characters for tests: `(thought)`, `[name:arguments]`, everything else is content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference.worker.dialects.answer_parts import (
    CallArguments,
    CallBegin,
    Content,
    Part,
    Reasoning,
    Tool,
    ToolChoice,
)
from inference.worker.dialects.dialect import AnswerOpening
from inference.worker.dialects.forms import Form, Json, Literal, OneOf, Repeat
from inference.worker.dialects.forms import Sequence as Then


class MarkParser:
    """Reads one character at a time; the name of a call is held back until it is complete."""

    def __init__(self, *, thinking: bool = False, calls: bool = True) -> None:
        self._in = "thought" if thinking else "content"
        self._calls = calls
        self._name = ""
        self._index = -1

    def push(self, text: str) -> Sequence[Part]:
        """One part per character at most."""
        if "!" in text:
            raise ValueError("the parser is broken")
        return [part for character in text if (part := self._read(character)) is not None]

    def _read(self, character: str) -> Part | None:
        if self._in == "thought":
            if character == ")":
                self._in = "content"
                return None
            return Reasoning(character)
        if self._in == "name":
            if character != ":":
                self._name += character
                return None
            self._in, self._index = "arguments", self._index + 1
            return CallBegin(self._index, self._name, "own" if self._name == "known" else "")
        if self._in == "arguments":
            if character == "]":
                self._in = "content"
                return None
            return CallArguments(self._index, character)
        if character == "(":
            self._in = "thought"
        elif character == "[" and self._calls:
            self._in, self._name = "name", ""
        else:
            return Content(character)
        return None

    def flush(self) -> Sequence[Part]:
        """An incomplete name is content."""
        held, self._name = self._name, ""
        return [Content(f"[{held}")] if self._in == "name" else []


@dataclass(frozen=True, slots=True)
class MarkDialect:
    """Presents tools as a template variable with their names."""

    name: str = "marks"
    has_call_notation: bool = True
    always_has_parts: bool = True
    shows: frozenset[str] = frozenset()
    ends: frozenset[str] = frozenset()
    forces: bool = True

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], choice: ToolChoice
    ) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
        """The messages unchanged."""
        return list(messages), {"tools": [{"name": tool.name, "description": tool.description} for tool in tools]}

    def parser(self, *, tools: Sequence[Tool], opened: str) -> MarkParser:
        """`opened` ends in `(` if the template began a reasoning."""
        return MarkParser(thinking=opened.endswith("("), calls=bool(tools))

    def form(self, tools: Sequence[Tool], choice: ToolChoice, *, opened: str) -> Form | None:
        """Only forced calls are constrained."""
        if choice.mode in ("none", "auto") or not self.forces:
            return None
        named = [tool for tool in tools if choice.name in (None, tool.name)]
        calls = [Then((Literal(f"[{tool.name}:"), Json(tool.parameters or True), Literal("]"))) for tool in named]
        return Repeat(OneOf(tuple(calls)), 1, None if choice.parallel else 1)

    def wrap(self, form: Form, *, opened: str) -> Form:
        """The form after the thought."""
        return Then((Literal("()"), form)) if self.always_has_parts else form

    def opening_of(self, message: Mapping[str, Any], *, opened: str) -> AnswerOpening:
        """Its content."""
        return AnswerOpening((Literal(message["content"]),), opened + message["content"])
