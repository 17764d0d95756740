"""Hermes and Qwen: calls as JSON objects between <tool_call> and </tool_call>.

Templates without a known notation of tools get the same notation, explained in a message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inference.worker.dialects import forms
from inference.worker.dialects.answer_parts import Content, Tool, ToolChoice
from inference.worker.dialects.conversation import as_text, explained, joined, runs
from inference.worker.dialects.dialect import CallingDialect, object_call, one_of, quoted
from inference.worker.dialects.forms import Form, Literal, Marker, Repeat
from inference.worker.dialects.reading import CallReader, Markers, Steps
from inference.worker.dialects.thinking import Thinking

BEGIN = "<tool_call>"
END = "</tool_call>"

_BEGIN = Markers(BEGIN)

_ABOUT = """\
You can call functions. Each line between <tools> and </tools> describes one of them as JSON:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as JSON in exactly this way:
{begin}
{{"name": "the function", "arguments": {{"a parameter": "its value"}}}}
{end}
Write one such block for every call, and nothing after the last one. The results come back in the next message, between
<tool_response> and </tool_response>. If no function helps, just answer."""


class HermesParser(CallReader):
    """Reasoning, then text and calls in any order. Only calls have this marker, so a call of an unknown function is a
    call too; the closing marker may be missing.
    """

    def called(self) -> Steps[None]:
        """Text and calls."""
        while (yield from self.until(_BEGIN, Content)):
            if (yield from self.try_call(self.calls(), BEGIN)):
                yield from self.space()
                yield from self.literal(END)


class Hermes(CallingDialect):
    """The dialect."""

    name = "hermes"
    reader = HermesParser
    markers = frozenset({BEGIN, END})
    opening: str | None = BEGIN

    def calls(self, tools: Sequence[Tool], most: int | None) -> Form:
        """Each call between its own markers, on lines of their own."""
        one = one_of(
            [
                forms.Sequence((Marker(BEGIN), Literal("\n"), *object_call(tool), Literal("}\n"), Marker(END)))
                for tool in tools
            ]
        )
        return Repeat(one, 1, most, Literal("\n"))


class Generic(Hermes):
    """Hermes' notation for templates without a known one. `system`: the template accepts a system message."""

    name = "generic"
    has_call_notation = False

    def __init__(self, thinking: Thinking | None = None, *, system: bool = True) -> None:
        super().__init__(thinking, text_arguments=True)
        self._system = system

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], choice: ToolChoice
    ) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
        """The messages, with an explanation of the tools."""
        turns, variables = super().prepare(messages, tools, choice)
        if not variables:
            return turns, {}
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in variables["tools"])
        about = _ABOUT.format(tools=lines, begin=BEGIN, end=END)
        return [*explained(turns, about, system=self._system)], {}

    def turns(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Messages in which calls and results are plain text of assistant and user."""
        found: list[dict[str, Any]] = []
        answered = False
        for run in runs(messages, "tool"):
            message = run[0]
            if message["role"] == "tool":
                message = {"role": "user", "content": "\n".join(_result(result["content"]) for result in run)}
            for call in message.pop("tool_calls", ()):
                message["content"] = joined(message.get("content"), _written(call["function"]))
            if answered and message["role"] == "user":
                # Many templates require alternating turns, so a user message after results is joined to them.
                found[-1]["content"] = joined(found[-1]["content"], message["content"])
            else:
                found.append(message)
            answered = run[0]["role"] == "tool"
        return found


def _written(function: Mapping[str, Any]) -> str:
    return f'{BEGIN}\n{{"name": {quoted(function["name"])}, "arguments": {as_text(function["arguments"])}}}\n{END}'


def _result(content: Any) -> str:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return f"<tool_response>\n{text}\n</tool_response>"
