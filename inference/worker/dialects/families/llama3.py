"""Llama 3.1 and later: a call is a JSON object with `parameters`, often without a marker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference.worker.dialects import forms
from inference.worker.dialects.answer_parts import Content, Tool, ToolChoice
from inference.worker.dialects.conversation import one_at_a_time
from inference.worker.dialects.dialect import CallingDialect, led, object_call, one_of, wanted
from inference.worker.dialects.forms import AnyText, Form, Literal, Marker
from inference.worker.dialects.reading import CallReader, Markers, Steps
from inference.worker.dialects.thinking import TEXT_BEGUN, Thinking

TAG = "<|python_tag|>"

_TAG = Markers(TAG)
_BEGINNINGS = ("<|end_header_id|>", "<|header_end|>")


class Llama3Parser(CallReader):
    """Optional reasoning, then bare JSON or text.

    Bare JSON is a call only at the beginning of an answer that the prompt has not begun, and only with the name of a
    given tool. After <|python_tag|> an object with any name is a call; code after it is content, including the tag.
    """

    def called(self) -> Steps[None]:
        """Bare JSON at the beginning, then text and marked calls."""
        if _starts(self._thinking, self._opened):
            yield from self.try_call(self._bare())
        while (yield from self.until(_TAG, Content)):
            yield from self.try_call(self.calls(), TAG)

    def _bare(self) -> Steps[None]:
        yield from self.space()
        if (yield from self.peek()) == "{":
            yield from self.calls(self._tools)
        else:
            self.give_back()


def _starts(thinking: Thinking | None, opened: str) -> bool:
    """Whether bare JSON after `opened` may be a call."""
    thinks = thinking is not None and thinking.place(opened) != "before" and not opened.endswith(TEXT_BEGUN)
    return thinks or opened.rstrip().endswith(_BEGINNINGS)


class Llama3(CallingDialect):
    """The dialect. Its templates write one call per turn, so a forced answer has one call."""

    name = "llama3"
    reader = Llama3Parser
    markers = frozenset({TAG})
    ends = frozenset({"<|eom_id|>", "<|eot_id|>"})

    def turns(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """One call per message."""
        return one_at_a_time(messages)

    def form(self, tools: Sequence[Tool], choice: ToolChoice, *, opened: str) -> Form | None:
        """If no call is required, an object may be text, unless a tool is strict.

        With a strict tool an object at the beginning or after the tag is a call.
        """
        chosen = wanted(tools, choice)
        if choice.mode != "auto" or not any(tool.strict for tool in chosen):
            return super().form(tools, choice, opened=opened)
        call = self.calls(chosen, 1)
        bare = [call] if _starts(self.thinking, opened) else []
        thought = [] if self.thinking is None else [self.thinking.begin]  # after which an answer begins again
        text = AnyText((TAG,), ("{", *thought) if bare else ())
        return self.wrap(one_of([text, led(text, forms.Sequence((Marker(TAG), call))), *bare]), opened=opened)

    def calls(self, tools: Sequence[Tool], most: int | None) -> Form:
        """One bare object."""
        return one_of([forms.Sequence((*object_call(tool, "parameters"), Literal("}"))) for tool in tools])
