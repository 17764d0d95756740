"""Mistral: calls after [TOOL_CALLS], as a JSON list or as name[ARGS]{...}."""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Sequence
from typing import Any

from inference.worker.dialects import forms
from inference.worker.dialects.answer_parts import Content, Tool
from inference.worker.dialects.dialect import CallingDialect, arguments_of, object_call, one_of
from inference.worker.dialects.forms import Form, Literal, Marker, Regex, Repeat
from inference.worker.dialects.reading import CallReader, Markers, Steps
from inference.worker.dialects.thinking import Thinking

CALLS = "[TOOL_CALLS]"
ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"

_CALLS = Markers(CALLS)
_ID = re.compile(r"[A-Za-z0-9]{9}")
_LETTERS = string.digits + string.ascii_letters


class MistralParser(CallReader):
    """Reasoning, then text and calls in either notation. The marker is a control token, so a call of an unknown
    function counts as a call.
    """

    def called(self) -> Steps[None]:
        """Text and calls."""
        while (yield from self.until(_CALLS, Content)):
            yield from self.try_call(self._call(), CALLS)

    def _call(self) -> Steps[None]:
        yield from self.space()
        if (yield from self.peek()) in ("[", "{"):
            yield from self.calls()
            return
        name = yield from self.word()
        id = (yield from self.word()) if (yield from self.literal(ID)) else ""
        yield from self.literal(ARGUMENTS)
        yield from self.space()
        yield from self.arguments(name, id)


class Mistral(CallingDialect):
    """The dialect. `lists`: the template writes calls as a JSON list. `ids`: it writes [CALL_ID]."""

    name = "mistral"
    reader = MistralParser
    markers = frozenset({CALLS, ID, ARGUMENTS})
    opening: str | None = CALLS

    def __init__(
        self, thinking: Thinking | None = None, *, text_arguments: bool = False, lists: bool = False, ids: bool = False
    ) -> None:
        super().__init__(thinking, text_arguments=text_arguments)
        self._lists = lists
        self._ids = ids

    def turns(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Ids of nine letters or digits, which these templates require."""
        for message in messages:
            if "tool_calls" in message:
                message["tool_calls"] = [{**call, "id": short_id(call["id"])} for call in message["tool_calls"]]
            if "tool_call_id" in message:
                message["tool_call_id"] = short_id(message["tool_call_id"])
        return messages

    def calls(self, tools: Sequence[Tool], most: int | None) -> Form:
        """One marker and a list, or a marker before every call."""
        if self._lists:
            closing = forms.OneOf(
                (Literal("}"), forms.Sequence((Literal(', "id": "'), Regex(_ID.pattern), Literal('"}'))))
            )
            one = one_of([forms.Sequence((*object_call(tool), closing)) for tool in tools])
            return forms.Sequence((Marker(CALLS), Literal("["), Repeat(one, 1, most, Literal(", ")), Literal("]")))
        id: tuple[Form, ...] = (Marker(ID), Regex(_ID.pattern)) if self._ids else ()
        one = one_of(
            [
                forms.Sequence((Marker(CALLS), Literal(tool.name), *id, Marker(ARGUMENTS), arguments_of(tool)))
                for tool in tools
            ]
        )
        return Repeat(one, 1, most)


def short_id(id: str) -> str:
    """`id` if it has nine letters or digits, otherwise nine that are derived from it."""
    if _ID.fullmatch(id):
        return id
    number = int.from_bytes(hashlib.sha256(id.encode("utf-8", "surrogatepass")).digest(), "big")
    return "".join(_LETTERS[number // len(_LETTERS) ** place % len(_LETTERS)] for place in range(9))
