"""gpt-oss: an answer is a sequence of messages with channels and recipients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from inference.worker.dialects import forms
from inference.worker.dialects.answer_parts import AnswerParser, Content, Kind, Reasoning, Tool, ToolChoice
from inference.worker.dialects.conversation import joined, one_at_a_time
from inference.worker.dialects.dialect import (
    AnswerOpening,
    Dialect,
    arguments_of,
    one_of,
    wanted,
)
from inference.worker.dialects.forms import AnyText, Form, Literal, Marker, Repeat
from inference.worker.dialects.reading import Markers, NoCallError, Reader, Steps

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"

_CLOSING = (END, CALL, RETURN)
_ENDS = Markers(END, CALL, RETURN, START, CHANNEL)
_NAMESPACE = "functions."
_BREAK = "\n\n"

_ABOUT = """\
# Tools

You can call these functions, each described as JSON:
{tools}

To call one, send its arguments as one JSON object to functions.NAME on the commentary channel."""


class HarmonyParser(Reader):
    """A message on the channel `analysis` is reasoning, a message to `functions.NAME` is a call, others are content.
    The recipient may be before or after the channel.

    Only calls have this recipient, so a call of an unknown function is a call too. A message to another recipient, as
    to a tool of the vendor, is content, including its header. Two messages of one kind are separated by an empty line;
    other white space is kept, except around arguments and between messages. A header that the end of the answer cuts
    off is dropped.
    """

    def __init__(self, opened: str, names: Collection[str]) -> None:
        super().__init__(())
        self._names = names
        self._kinds: set[Kind] = set()
        header = _open_header(opened)
        self.push(_begun(opened) if header is None else header + MESSAGE)
        self._read.clear()

    def answer(self) -> Steps[None]:
        """The whole answer."""
        marker = ""
        while True:
            self._read[:] = [marker]
            try:
                channel, recipient = yield from self._header(marker)
            except NoCallError:
                if self._is_cut():
                    return
                self.give_back()
                marker = yield from self._rest_of_message(Content)
            else:
                marker = yield from self._body(channel, recipient)
            if not marker:
                return

    def _header(self, marker: str) -> Steps[tuple[str, str]]:
        """Channel and recipient of the message that `marker` opens; empty: the message that the prompt has begun."""
        if marker == START:
            yield from self.word()
        channel = (yield from self.word()) if marker == CHANNEL else ""
        recipient = ""
        typed = False
        while True:
            yield from self.space()
            if (yield from self.literal(MESSAGE)):
                return channel, recipient
            if (yield from self.literal(CHANNEL)):
                yield from self.space()
                channel, typed = (yield from self.word()), False
            elif (yield from self.literal("to=")):
                to = yield from self.word()
                recipient = recipient if to == "assistant" else to
            elif channel and not typed:
                yield from self.literal(CONSTRAIN)
                yield from self.space()
                yield from self.word()
                typed = True
            else:
                raise NoCallError

    def _body(self, channel: str, recipient: str) -> Steps[str]:
        """Reads the message; returns the marker that opens the next one."""
        kind: Kind = Reasoning if channel == "analysis" and not recipient else Content
        name = self._function(recipient)
        if name:
            yield from self.try_call(self._arguments(name), *self._read)
        elif recipient:
            self.give_back()
        else:
            if kind in self._kinds:
                self.out.text(kind, _BREAK)
            self._kinds.add(kind)
        return (yield from self._rest_of_message(kind))

    def _function(self, recipient: str) -> str:
        """The function of a recipient; empty if it is not a function or there are no tools."""
        if recipient in self._names:
            return recipient
        return recipient[len(_NAMESPACE) :] if self._names and recipient.startswith(_NAMESPACE) else ""

    def _rest_of_message(self, kind: Kind) -> Steps[str]:
        """Emits text until another message begins; returns its marker, empty at the end of the answer.

        Within a message the text of a marker is plain text.
        """
        while (marker := (yield from self.until(_ENDS, kind))) in _CLOSING:
            self._read[:] = [marker]
            yield from self.space()
            for opening in (START, CHANNEL):
                if (yield from self.literal(opening)):
                    return opening
            if not (yield from self.more()):
                return ""
            self.give_back(kind)
        return marker

    def _is_cut(self) -> bool:
        """Whether the answer ends inside a header, whose text is dropped."""
        return self._ended and self._at == len(self._text) and any(CHANNEL in read for read in self._read)

    def _arguments(self, name: str) -> Steps[None]:
        yield from self.space()
        yield from self.arguments(name, closing=_CLOSING)
        yield from self.space()


class Harmony(Dialect):
    """The dialect. A call ends the answer, so a forced answer has at most one call. `presents`: the template presents
    tools.
    """

    name = "harmony"
    markers = frozenset({START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL})
    ends = frozenset({CALL, RETURN})

    def __init__(self, *, text_arguments: bool = False, presents: bool = True) -> None:
        super().__init__(text_arguments=text_arguments, about=None if presents else _ABOUT)

    @property
    def always_has_parts(self) -> bool:
        """Every answer has channels."""
        return True

    def turns(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """One call per message, and reasoning as `thinking`.

        Beside a call the template accepts thinking or content, not both, and writes it as analysis.
        """
        found = one_at_a_time(messages)
        for message in found:
            if thought := message.pop("reasoning_content", None):
                message["thinking"] = thought
                if "tool_calls" in message and (content := message.pop("content", None)):
                    message["thinking"] = joined(thought, content)
        return found

    def parser(self, *, tools: Sequence[Tool], opened: str) -> AnswerParser:
        """A parser of one answer."""
        return HarmonyParser(opened, {tool.name for tool in tools})

    def opening_of(self, message: Mapping[str, Any], *, opened: str) -> AnswerOpening:
        """Reasoning on its channel, content on the final one."""
        parts_by_channel = (("analysis", message.get("reasoning_content")), ("final", message.get("content")))
        parts: list[Literal | Marker] = []
        for channel, text in parts_by_channel:
            if text:
                if parts:
                    parts += [Marker(END), Marker(START), Literal("assistant")]
                parts += [Marker(CHANNEL), Literal(channel), Marker(MESSAGE), Literal(text)]
        return AnswerOpening(tuple(parts), opened + "".join(part.text for part in parts[-4:-1]))

    def form(self, tools: Sequence[Tool], choice: ToolChoice, *, opened: str) -> Form | None:
        """Reasoning and preambles, then a call, or the final message if no call is required."""
        chosen = wanted(tools, choice)
        if not chosen:
            return None
        ends = [style for tool in chosen for style in _calls(tool)]
        if choice.mode == "auto":
            ends.append(forms.Sequence((Marker(CHANNEL), Literal("final"), Marker(MESSAGE), AnyText())))
        before = one_of([_message("analysis"), _message("commentary")])
        form = forms.Sequence((Repeat(before, 0, None), one_of(ends)))
        header = _open_header(opened)
        if header is None:
            return form
        return _after_thought(form) if "analysis" in header else None

    def wrap(self, form: Form, *, opened: str) -> Form:
        """Reasoning, then `form` on the final channel."""
        json = forms.Sequence((Literal("final "), Marker(CONSTRAIN), Literal("json")))
        final = (Marker(CHANNEL), one_of([Literal("final"), json]), Marker(MESSAGE), form)
        whole = forms.Sequence((Repeat(_message("analysis"), 0, None), *final))
        header = _open_header(opened)
        if header is None:
            return whole
        return _after_thought(whole) if "analysis" in header else form


def _begun(opened: str) -> str:
    """What the prompt already contains of the answer's first message, after the role: its header or a part of it, and
    perhaps the beginning of its text.
    """
    return opened.rpartition(START)[2].removeprefix("assistant") if START in opened else ""


def _open_header(opened: str) -> str | None:
    """The header of the message that the prompt has begun; None if the prompt does not end in the text of a message."""
    header, message, _ = _begun(opened).partition(MESSAGE)
    return header if message else None


def _message(channel: str) -> Form:
    """A complete message that is followed by another one."""
    return _next(Marker(CHANNEL), Literal(channel), Marker(MESSAGE), AnyText())


def _after_thought(form: Form) -> Form:
    """The rest of reasoning that the prompt has begun, then `form`."""
    return forms.Sequence((_next(AnyText()), form))


def _next(*message: Form) -> Form:
    return forms.Sequence((*message, Marker(END), Marker(START), Literal("assistant")))


def _calls(tool: Tool) -> list[Form]:
    """A call with its recipient after the channel, as most models write it, or before it, as the template does."""
    to = f"to={_NAMESPACE}{tool.name}"
    body = (Marker(MESSAGE), arguments_of(tool))
    constrained = (Literal(f"commentary {to} "), Marker(CONSTRAIN), Literal("json"))
    return [
        forms.Sequence((Marker(CHANNEL), *constrained, *body)),
        forms.Sequence((Literal(f" {to}"), Marker(CHANNEL), Literal("commentary json"), *body)),
    ]
