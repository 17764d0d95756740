"""No template at all: an answer is text; decides that nothing in it is a call or reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inference.worker.core.dialects.base import Family
from inference.worker.core.dialects.reading import Reader, Steps
from inference.worker.core.parts import AnswerParser, Tool, ToolChoice


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
