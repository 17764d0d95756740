"""Models without a template: an answer is plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inference.worker.dialects.answer_parts import AnswerParser, Tool, ToolChoice
from inference.worker.dialects.dialect import Family
from inference.worker.dialects.reading import Reader, Steps


class PlainParser(Reader):
    """Everything is content."""

    def __init__(self) -> None:
        super().__init__(())

    def answer(self) -> Steps[None]:
        """The whole answer."""
        yield from self.rest()


class Plain(Family):
    """The dialect."""

    name = "plain"
    writes_tools = False

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], choice: ToolChoice
    ) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
        """The messages as they are."""
        return list(messages), {}

    def parser(self, *, tools: Sequence[Tool], opened: str) -> AnswerParser:
        """A parser of one answer."""
        return PlainParser()
