"""The parts of a structured answer (content, reasoning, tool calls), and the tools that can be called."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`name` is set when the mode is `named`."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Content:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a tool call. Calls are numbered from 0. `id` is the one that the model writes, else empty."""

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Content | Reasoning | CallBegin | CallArguments
Kind = type[Content] | type[Reasoning]

SPACE = " \t\r\n"


def joined(parts: tuple[Part, ...], more: tuple[Part, ...]) -> tuple[Part, ...]:
    """`parts` followed by `more`; if the first of `more` continues the last of `parts`, they are joined."""
    if not parts or not more:
        return parts or more
    last, first = parts[-1], more[0]
    if isinstance(last, CallBegin) or isinstance(first, CallBegin) or type(last) is not type(first):
        return parts + more
    if isinstance(last, CallArguments) and isinstance(first, CallArguments) and last.index != first.index:
        return parts + more
    return (*parts[:-1], replace(last, text=last.text + first.text), *more[1:])


class AnswerParser(Protocol):
    """Divides the text of one answer into parts as it is generated.

    The joined texts of the parts do not depend on how the text is divided into pushes. Text that turns out not to be a
    call is content.
    """

    def push(self, text: str) -> Sequence[Part]:
        """The parts that `text` completes or continues; control tokens appear in it as their texts."""
        ...

    def flush(self) -> Sequence[Part]:
        """The parts that were held back, at the end of the answer."""
        ...


class PartCollector:
    """Collects the parts of an answer; adjacent parts of one kind are joined.

    White space next to a border (a marker of reasoning, a call) is removed. White space that a border may follow is
    therefore held back until other text follows, or the answer ends.
    """

    def __init__(self, holds: Collection[Kind]) -> None:
        """`holds` are the kinds of text that a border may follow."""
        self._holds = frozenset(holds)
        self._parts: list[Part] = []
        self._held: list[str] = []
        self._held_kind: Kind = Content
        self._trims = False
        self.calls = 0
        """Calls that have begun."""

    def text(self, kind: Kind, text: str) -> None:
        """Adds text of a kind."""
        if self._trims:
            text = text.lstrip(SPACE)
            self._trims = not text
        body = text.rstrip(SPACE) if kind in self._holds else text
        if body:
            self._add(kind, "".join([*self._held, body]))
            self._held.clear()
        if len(body) < len(text):
            self._held.append(text[len(body) :])
            self._held_kind = kind

    def border(self) -> None:
        """Removes white space before and after this place."""
        self._held.clear()
        self._trims = True

    def begin(self, name: str, id: str) -> None:
        """Begins a call, numbered in order."""
        self.border()
        self._parts.append(CallBegin(self.calls, name, id))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Adds text to the arguments of the last call."""
        if self._parts and isinstance(last := self._parts[-1], CallArguments):
            self._parts[-1] = CallArguments(last.index, last.text + text)
        elif text:
            self._parts.append(CallArguments(self.calls - 1, text))

    def end(self) -> None:
        """Emits held white space at the end of the answer."""
        self._add(self._held_kind, "".join(self._held))
        self._held.clear()

    def take(self) -> Sequence[Part]:
        """The parts since the last `take`."""
        parts, self._parts = self._parts, []
        return parts

    def _add(self, kind: Kind, text: str) -> None:
        if self._parts and isinstance(last := self._parts[-1], kind):
            self._parts[-1] = kind(last.text + text)
        elif text:
            self._parts.append(kind(text))
