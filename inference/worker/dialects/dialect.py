"""The base of dialects, and the parts that most families of chat templates share."""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference.worker.dialects import forms
from inference.worker.dialects.answer_parts import AnswerParser, Tool, ToolChoice
from inference.worker.dialects.conversation import described, explained, normal
from inference.worker.dialects.forms import AnyText, Form, Json, Literal, Marker, Repeat
from inference.worker.dialects.reading import CallReader
from inference.worker.dialects.thinking import TEXT_BEGUN, Thinking


@dataclass(frozen=True, slots=True)
class AnswerOpening:
    """The beginning of an answer: literals are plain text, markers are control tokens. `opened` describes its end
    for the parser and the form of the rest: the last marker, and whether text has begun after it.
    """

    parts: tuple[Literal | Marker, ...]
    opened: str


class Dialect(abc.ABC):
    """How one family of chat templates writes tools, calls and reasoning.

    `text_arguments`: the template writes arguments of earlier calls as text.
    """

    name = ""
    """hermes, qwen-xml, llama3, mistral, deepseek, deepseek-dsml, harmony or generic."""
    has_call_notation = True
    """Whether the family has a notation of calls; `generic` uses that of Hermes."""
    ends: frozenset[str] = frozenset()
    """Texts of control tokens that end an answer, besides the model's own."""
    markers: frozenset[str] = frozenset()
    """Texts of control tokens in calls."""

    def __init__(
        self, thinking: Thinking | None = None, *, text_arguments: bool = False, about: str | None = None
    ) -> None:
        """`about` is a text that explains {tools} in a message, for a template that does not present them."""
        self.thinking = thinking
        self._text_arguments = text_arguments
        self._about = about

    @property
    def always_has_parts(self) -> bool:
        """Whether answers have parts, such as reasoning, even without tools, and so always need a parser."""
        return self.thinking is not None

    @property
    def shows(self) -> frozenset[str]:
        """Texts of control tokens that the parser needs."""
        return self.markers if self.thinking is None else self.markers | {self.thinking.begin, self.thinking.end}

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], choice: ToolChoice
    ) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
        """Messages in the form that the template needs, and further template variables.

        The tools are presented or explained unless none may be called.
        """
        turns = self.turns(normal(messages, text_arguments=self._text_arguments))
        if not tools or choice.mode == "none":
            return [*turns], {}
        if self._about is None:
            return [*turns], {"tools": described(tools)}
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in described(tools))
        return [*explained(turns, self._about.replace("{tools}", lines))], {}

    def turns(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """`normal` messages in the form that the template needs."""
        return messages

    @abc.abstractmethod
    def parser(self, *, tools: Sequence[Tool], opened: str) -> AnswerParser:
        """A parser of one answer to a prompt that ends in `opened`. Without tools no text is a call."""

    @abc.abstractmethod
    def form(self, tools: Sequence[Tool], choice: ToolChoice, *, opened: str) -> Form | None:
        """The form of an answer with these tools; None where any text is allowed."""

    def wrap(self, form: Form, *, opened: str) -> Form:
        """A constrained answer in the family's notation: `form` after reasoning, if the family has reasoning."""
        return form if self.thinking is None else self.thinking.first(form, opened)

    def opening_of(self, message: Mapping[str, Any], *, opened: str) -> AnswerOpening:
        """The assistant's message after a prompt that ends in `opened`, so that the answer continues it.

        Reasoning is written between its markers; families without reasoning drop it.
        """
        thought, content = message.get("reasoning_content") or "", message.get("content") or ""
        thinking = self.thinking
        place = "after" if thinking is None else thinking.place(opened)
        if thinking is None or not (thought or content):
            return AnswerOpening((Literal(content),), opened + content)
        if place == "after" or not (thought or place == "inside"):
            return AnswerOpening((Literal(content),), (thinking.end + TEXT_BEGUN) if content else opened)
        begin = () if place == "inside" else (Marker(thinking.begin), Literal("\n"))
        if not content:
            return AnswerOpening((*begin, Literal(thought)), thinking.begin + TEXT_BEGUN)
        end = (Literal(f"{thought}\n"), Marker(thinking.end), Literal(f"\n\n{content}"))
        return AnswerOpening((*begin, *end), thinking.end + TEXT_BEGUN)


class CallingDialect(Dialect):
    """A family with calls one after the other in the text. Subclasses define their notation."""

    reader: type[CallReader]
    """The parser of answers."""
    opening: str | None = None
    """The text before the first call, also after other text; None where no text marks calls reliably."""

    def parser(self, *, tools: Sequence[Tool], opened: str) -> AnswerParser:
        """A parser of one answer to a prompt that ends in `opened`. Without tools no text is a call."""
        return self.reader(self.thinking, opened, tools)

    def form(self, tools: Sequence[Tool], choice: ToolChoice, *, opened: str) -> Form | None:
        """Only calls if they are required; otherwise text, and calls from the first marker on."""
        chosen = wanted(tools, choice)
        if not chosen or (choice.mode == "auto" and self.opening is None):
            return None
        calls = self.calls(chosen, None if choice.parallel and choice.mode != "named" else 1)
        if choice.mode == "auto" and self.opening is not None:
            text = AnyText((self.opening,))
            calls = forms.OneOf((text, led(text, calls)))
        return self.wrap(calls, opened=opened)

    @abc.abstractmethod
    def calls(self, tools: Sequence[Tool], most: int | None) -> Form:
        """One to `most` calls of these tools."""


def wanted(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    """The tools that may be called."""
    if choice.mode == "none":
        return []
    return [tool for tool in tools if choice.mode != "named" or tool.name == choice.name]


def arguments_of(tool: Tool) -> Json:
    """The schema of a call's arguments: an object, empty without parameters."""
    if tool.parameters is None:
        return Json({"type": "object", "properties": {}, "additionalProperties": False}, tool.strict)
    return Json({"type": "object", **tool.parameters}, tool.strict, closed=True)


def quoted(text: str) -> str:
    """A text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def one_of(parts: Sequence[Form]) -> Form:
    """One form, or a choice of several."""
    return parts[0] if len(parts) == 1 else forms.OneOf(tuple(parts))


def led(text: Form, form: Form) -> Form:
    """`text` and then `form`, with `text` in the same terminal as the beginning of `form`.

    Where a marker is not a token, only one terminal of a grammar can separate text and marker.
    """
    if isinstance(form, forms.Sequence):
        return forms.Sequence((led(text, form.parts[0]), *form.parts[1:]))
    if isinstance(form, forms.OneOf):
        return forms.OneOf(tuple(led(text, part) for part in form.parts))
    if isinstance(form, Repeat):
        following = form.part if form.between is None else forms.Sequence((form.between, form.part))
        more = Repeat(following, 0, None if form.most is None else form.most - 1)
        return forms.Sequence((led(text, form.part), more))
    return forms.Sequence((text, form))


def object_call(tool: Tool, key: str = "arguments") -> tuple[Form, ...]:
    """A call as a JSON object, without its closing brace."""
    return Literal(f'{{"name": {quoted(tool.name)}, "{key}": '), arguments_of(tool)
