"""DeepSeek V3, R1 and V3.1: calls between special tokens, with or without code fences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference.worker.dialects import forms
from inference.worker.dialects.answer_parts import Content, Tool
from inference.worker.dialects.dialect import CallingDialect, arguments_of, one_of
from inference.worker.dialects.forms import Form, Literal, Marker, Repeat
from inference.worker.dialects.reading import CallReader, Markers, Steps
from inference.worker.dialects.thinking import Thinking

CALLS = "<｜tool▁calls▁begin｜>"  # noqa: RUF001 - the bars are the tokens' own
CALLS_END = "<｜tool▁calls▁end｜>"  # noqa: RUF001
CALL = "<｜tool▁call▁begin｜>"  # noqa: RUF001
CALL_END = "<｜tool▁call▁end｜>"  # noqa: RUF001
SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
FENCE = "```"

_BEGIN = Markers(CALLS, CALL)

_ABOUT = """\
## Tools

You can call these functions, each described as JSON:
{tools}

A call is written in exactly this way, with the arguments as one JSON object:
{call}
Several calls stand side by side, each from {begin} to {end}. If no function helps, just answer."""


class DeepSeekParser(CallReader):
    """Reasoning, then text and calls. V3 and R1 write a type, the name on the same line and fenced arguments; V3.1
    writes the name and bare arguments. Only calls have these markers, so a call of an unknown function is a call too.
    The marker around all calls, the fence and the closing markers may be missing.
    """

    def called(self) -> Steps[None]:
        """Text and calls."""
        while marker := (yield from self.until(_BEGIN, Content)):
            begun = yield from self.try_call(self._call(inside=marker == CALL), marker)
            while begun:
                yield from self._closing()
                begun = (yield from self.literal(CALL)) and (yield from self.try_call(self._call(inside=True), CALL))

    def _call(self, *, inside: bool) -> Steps[None]:
        if not inside:
            yield from self.space()
            yield from self.expect(CALL)
        name = yield from self.word()
        yield from self.expect(SEPARATOR)
        yield from self.space()
        if (yield from self.peek()) != "{":
            name = yield from self.word()
            yield from self.space()
            if (yield from self.literal(FENCE)):
                yield from self.literal("json")
                yield from self.space()
        yield from self.arguments(name)

    def _closing(self) -> Steps[None]:
        for text in (FENCE, CALL_END, CALLS_END):
            yield from self.space()
            yield from self.literal(text)
        yield from self.space()


class DeepSeek(CallingDialect):
    """The dialect. `fenced`: the template writes calls like V3 and R1. `presents`: it presents tools; most of these
    templates leave that to the system message.
    """

    name = "deepseek"
    reader = DeepSeekParser
    markers = frozenset({CALLS, CALLS_END, CALL, CALL_END, SEPARATOR})
    opening: str | None = CALLS

    def __init__(
        self,
        thinking: Thinking | None = None,
        *,
        text_arguments: bool = False,
        fenced: bool = False,
        presents: bool = True,
    ) -> None:
        about = None if presents else _about(fenced=fenced)
        super().__init__(thinking, text_arguments=text_arguments, about=about)
        self._fenced = fenced

    def turns(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Removes empty content beside calls, for which these templates would write an empty turn."""
        return [
            {**message, "content": message.get("content") or None} if "tool_calls" in message else message
            for message in messages
        ]

    def calls(self, tools: Sequence[Tool], most: int | None) -> Form:
        """All calls between one pair of markers."""
        one = one_of([forms.Sequence((Marker(CALL), *self._body(tool), Marker(CALL_END))) for tool in tools])
        between = Literal("\n") if self._fenced else None
        return forms.Sequence((Marker(CALLS), Repeat(one, 1, most, between), Marker(CALLS_END)))

    def _body(self, tool: Tool) -> tuple[Form, ...]:
        if not self._fenced:
            return Literal(tool.name), Marker(SEPARATOR), arguments_of(tool)
        before = Literal(f"{tool.name}\n{FENCE}json\n")
        return Literal("function"), Marker(SEPARATOR), before, arguments_of(tool), Literal(f"\n{FENCE}")


def _about(*, fenced: bool) -> str:
    body = f"function{SEPARATOR}NAME\n{FENCE}json\nARGUMENTS\n{FENCE}" if fenced else f"NAME{SEPARATOR}ARGUMENTS"
    call = f"{CALLS}{CALL}{body}{CALL_END}{CALLS_END}"
    return _ABOUT.format(tools="{tools}", call=call, begin=CALL, end=CALL_END)
