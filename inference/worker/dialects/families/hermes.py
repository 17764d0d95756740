"""Hermes and Qwen: calls as JSON objects between <tool_call> and </tool_call>."""

from __future__ import annotations

from collections.abc import Sequence

from inference.worker.dialects import forms
from inference.worker.dialects.answer_parts import AnswerParser, Content, Tool
from inference.worker.dialects.dialect import CallingFamily, object_call, one_of
from inference.worker.dialects.forms import Form, Literal, Marker, Repeat
from inference.worker.dialects.reading import CallReader, Markers, Steps

BEGIN = "<tool_call>"
END = "</tool_call>"

_BEGIN = Markers(BEGIN)


class HermesParser(CallReader):
    """Reasoning, then text and calls in any order. The marker is unique, so a call of an unknown function counts as a
    call; the closing marker may be missing.
    """

    def called(self) -> Steps[None]:
        """Text and calls."""
        while (yield from self.until(_BEGIN, Content)):
            if (yield from self.attempt(self.calls(), BEGIN)):
                yield from self.space()
                yield from self.literal(END)


class Hermes(CallingFamily):
    """The dialect."""

    name = "hermes"
    markers = frozenset({BEGIN, END})
    opening: str | None = BEGIN

    def parser(self, *, tools: Sequence[Tool], opened: str) -> AnswerParser:
        """A parser of one answer."""
        return HermesParser(self.thinking, opened, has_tools=bool(tools))

    def calls(self, tools: Sequence[Tool], most: int | None) -> Form:
        """Each call between its own markers, on lines of their own."""
        one = one_of(
            [
                forms.Sequence((Marker(BEGIN), Literal("\n"), *object_call(tool), Literal("}\n"), Marker(END)))
                for tool in tools
            ]
        )
        return Repeat(one, 1, most, Literal("\n"))
