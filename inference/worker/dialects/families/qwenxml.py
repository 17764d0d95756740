"""Qwen3-Coder and Qwen3.5: <function=name> and <parameter=key> between <tool_call> and </tool_call>."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inference.worker.dialects import forms
from inference.worker.dialects.answer_parts import Content, Tool
from inference.worker.dialects.dialect import CallingDialect, one_of
from inference.worker.dialects.forms import AnyText, Form, Literal, Marker, Regex, Repeat
from inference.worker.dialects.reading import Markers, NoCallError, Steps
from inference.worker.dialects.tagged import (
    KEY,
    TaggedReader,
    arguments_form,
    json_form,
    kind_of,
    properties_of,
    text_form,
    types_of,
)

BEGIN = "<tool_call>"
END = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"

_BEGIN = Markers(BEGIN, FUNCTION)
_VALUE_END = Markers(f"\n{PARAMETER_END}", PARAMETER_END)


class QwenXmlParser(TaggedReader):
    """Reasoning, then text and calls. Between <tool_call> and </tool_call> any name is a call; without <tool_call>,
    which these models often omit, only the name of a given tool. The closing markers may be missing.
    """

    def called(self) -> Steps[None]:
        """Text and calls."""
        while marker := (yield from self.until(_BEGIN, Content)):
            if (yield from self.try_call(self._call(is_marked=marker == BEGIN), marker)):
                yield from self.space()
                yield from self.literal(END)

    def _call(self, *, is_marked: bool) -> Steps[None]:
        if is_marked:
            yield from self.space()
            yield from self.expect(FUNCTION)
        name = yield from self.word()
        yield from self.expect(">")
        if not is_marked and name not in self._tools:
            raise NoCallError
        yield from self.object(name, self._arguments(properties_of(self._tools.get(name))))
        yield from self.literal(FUNCTION_END)

    def _arguments(self, schemas: Mapping[str, Any]) -> Steps[None]:
        yield from self.space()
        while (yield from self.literal(PARAMETER)):
            key = yield from self.word(KEY)
            yield from self.expect(">")
            yield from self.literal("\n")
            schema = schemas.get(key)
            yield from self.value(key, _VALUE_END, kind_of(schema), types_of(schema))
            yield from self.space()


class QwenXml(CallingDialect):
    """The dialect."""

    name = "qwen-xml"
    reader = QwenXmlParser
    markers = frozenset({BEGIN, END})
    opening: str | None = BEGIN

    def calls(self, tools: Sequence[Tool], most: int | None) -> Form:
        """Each call between its own markers, its arguments in the order of the tool's schema."""
        one = one_of([forms.Sequence((Marker(BEGIN), *_written(tool), Marker(END))) for tool in tools])
        return Repeat(one, 1, most, Literal("\n"))


def _written(tool: Tool) -> tuple[Form, ...]:
    def argument(key: Form, value: Form) -> Form:
        return forms.Sequence((Literal(PARAMETER), key, Literal(">\n"), value, Literal(f"\n{PARAMETER_END}\n")))

    def named(key: str, schema: Any) -> Form:
        is_json = kind_of(schema) == "json"
        return argument(Literal(key), json_form(tool, schema) if is_json else text_form(schema, PARAMETER_END))

    anything = argument(Regex(KEY.pattern), AnyText((PARAMETER_END,)))
    arguments = arguments_form(tool, named, anything)
    return Literal(f"\n{FUNCTION}{tool.name}>\n"), *arguments, Literal(f"{FUNCTION_END}\n")
