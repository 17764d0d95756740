"""DeepSeek V3.2 and V4: invocations and parameters in tags with the token ｜DSML｜."""
# ruff: noqa: RUF001, RUF002 - the bars are the token's own

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference.worker.dialects import forms
from inference.worker.dialects.answer_parts import Content, Tool
from inference.worker.dialects.dialect import CallingDialect, one_of
from inference.worker.dialects.forms import AnyText, Form, Literal, Marker, Regex, Repeat
from inference.worker.dialects.reading import Markers, Steps
from inference.worker.dialects.tagged import KEY, TaggedReader, arguments_form, json_form, kind_of, text_form
from inference.worker.dialects.thinking import Thinking

TOKEN = "｜DSML｜"
OLD, NEW = "function_calls", "tool_calls"
"""The names of the block of all calls in V3.2 and V4."""

_BEGIN = Markers(f"<{TOKEN}{OLD}>", f"<{TOKEN}{NEW}>", f"<{TOKEN}invoke")
_INVOKE = f"<{TOKEN}invoke"
_INVOKE_END = f"</{TOKEN}invoke>"
_PARAMETER = f"<{TOKEN}parameter"
_PARAMETER_END = f"</{TOKEN}parameter>"
_VALUE_END = Markers(_PARAMETER_END)


class DsmlParser(TaggedReader):
    """Reasoning, then text and calls. Only calls have this token, so a call of an unknown function is a call too. A
    block of either name may enclose all calls, or none; closing tags may be missing.
    """

    def called(self) -> Steps[None]:
        """Text and calls."""
        while marker := (yield from self.until(_BEGIN, Content)):
            begun = yield from self.try_call(self._call(is_tag_read=marker == _INVOKE), marker)
            while begun:
                yield from self.space()
                if (yield from self.literal(_INVOKE)):
                    begun = yield from self.try_call(self._call(is_tag_read=True), _INVOKE)
                    continue
                for block in (OLD, NEW):
                    yield from self.literal(f"</{TOKEN}{block}>")
                begun = False

    def _call(self, *, is_tag_read: bool) -> Steps[None]:
        if not is_tag_read:
            yield from self.space()
            yield from self.expect(_INVOKE)
        name = yield from self._attribute("name")
        yield from self.expect(">")
        yield from self.object(name, self._arguments())
        yield from self.literal(_INVOKE_END)

    def _arguments(self) -> Steps[None]:
        yield from self.space()
        while (yield from self.literal(_PARAMETER)):
            key = yield from self._attribute("name")
            is_text = yield from self._attribute("string")
            yield from self.expect(">")
            yield from self.value(key, _VALUE_END, "text" if is_text == "true" else "json")
            yield from self.space()

    def _attribute(self, name: str) -> Steps[str]:
        yield from self.expect(f' {name}="')
        value = yield from self.word(KEY)
        yield from self.expect('"')
        return value


class Dsml(CallingDialect):
    """The dialect; `block` is the name of the tag around all calls."""

    name = "deepseek-dsml"
    reader = DsmlParser
    markers = frozenset({TOKEN})

    def __init__(self, thinking: Thinking | None = None, *, text_arguments: bool = False, block: str = NEW) -> None:
        super().__init__(thinking, text_arguments=text_arguments)
        self._block = block
        self.opening = f"<{TOKEN}{block}>"

    def calls(self, tools: Sequence[Tool], most: int | None) -> Form:
        """All calls in one block, the arguments of each in the order of the tool's schema."""
        one = one_of([forms.Sequence(_written(tool)) for tool in tools])
        return forms.Sequence((*_tag("<", f"{self._block}>\n"), Repeat(one, 1, most), *_tag("</", f"{self._block}>")))


def _tag(opens: str, rest: str) -> tuple[Form, Form, Form]:
    return Literal(opens), Marker(TOKEN), Literal(rest)


def _written(tool: Tool) -> tuple[Form, ...]:
    def argument(key: Form, value: Form, *, is_text: bool) -> Form:
        kind = Literal(f'" string="{"true" if is_text else "false"}">')
        end = _tag("</", "parameter>\n")
        return forms.Sequence((*_tag("<", 'parameter name="'), key, kind, value, *end))

    def named(key: str, schema: Any) -> Form:
        kind = kind_of(schema)
        found: list[Form] = []
        if kind != "json":
            found.append(argument(Literal(key), text_form(schema, _END), is_text=True))
        if kind != "text":
            found.append(argument(Literal(key), json_form(tool, schema), is_text=False))
        return one_of(found)

    anything = argument(Regex(KEY.pattern), AnyText((_END,)), is_text=True)
    arguments = arguments_form(tool, named, anything)
    begin = _tag("<", f'invoke name="{tool.name}">\n')
    return *begin, *arguments, *_tag("</", "invoke>\n")


_END = f"</{TOKEN}"
