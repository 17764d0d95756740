"""Collects the parts of an answer, and removes white space at their borders."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from inference.worker.dialects.answer_parts import CallArguments, CallBegin, Content, Part, Reasoning

SPACE = " \t\r\n"

Kind = type[Content] | type[Reasoning]


class Output:
    """The parts, with adjacent parts of one kind joined.

    White space next to a border (a marker of reasoning, a call) is removed. Text before a possible border is therefore
    held back while it ends in white space, and emitted at the end of the answer.
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
        """The parts since the last call."""
        parts, self._parts = self._parts, []
        return parts

    def _add(self, kind: Kind, text: str) -> None:
        if self._parts and isinstance(last := self._parts[-1], kind):
            self._parts[-1] = kind(last.text + text)
        elif text:
            self._parts.append(kind(text))
