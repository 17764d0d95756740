"""Base of the parsers: reads an answer while it is generated.

A family's parser is one generator that reads like the grammar of its answers. Its steps yield where text is missing and
continue there, so each character is read once and the division of the text into pushes has no effect. Text of a call
that turns out not to be one is content, and reading continues where it failed.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Sequence
from typing import Any, TypeVar

from inference.worker.dialects.answer_parts import SPACE, Content, Kind, Part, PartCollector, Reasoning, Tool
from inference.worker.dialects.thinking import TEXT_BEGUN, Thinking

_INSIDE = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]<]')


class ValueEnd:
    """Finds the end of one JSON object, array or string; every character is read once.

    Brackets are counted outside of strings. A `<` outside of a string is invalid in JSON and ends the value, because a
    model that continues with the closing marker of a call has forgotten a bracket.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def whole(self) -> bool:
        """Whether all brackets and strings are closed."""
        return self._depth == 0 and not self._in_string

    def scan(self, text: str, at: int) -> tuple[int, bool]:
        """Scans `text` from `at`, where the last scan stopped. Returns the position, and whether the value ends."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_INSIDE if self._in_string else _OUTSIDE).search(text, at)
            if match is None:
                return len(text), False
            at, char = match.end(), match[0]
            if char == "<":
                return at - 1, True
            if char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if char in "{[" else -1
            if self.whole:
                return at, True
        return at, False


T = TypeVar("T")
Steps = Generator[None, None, T]

MAX_NAME = 256
"""Longest name or key of a call, in characters as written."""

NAME = re.compile(r"""[^\s<>\[\]{}"'`|]+""")
"""The characters of a function name without quotes."""

_SPACE = re.compile(f"[{SPACE}]+")
_SCALAR = re.compile(r"[^\s,\]}<]+")


class NoCallError(Exception):
    """The text is not a call in the family's notation."""


class Markers:
    """Texts that end plain text; none is a prefix of another."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        self._starts = frozenset(text[0] for text in texts)
        self._most = max(map(len, texts)) - 1

    def search(self, text: str, at: int) -> re.Match[str] | None:
        """The first marker at or after `at`."""
        return self._pattern.search(text, at)

    def unfinished(self, text: str, at: int) -> int:
        """The start of a possible incomplete marker at the end of `text`; the length of `text` if there is none."""
        for start in range(max(at, len(text) - self._most), len(text)):
            if text[start] in self._starts and any(marker.startswith(text[start:]) for marker in self._texts):
                return start
        return len(text)


class Reader(ABC):
    """An AnswerParser whose grammar is `answer`."""

    def __init__(self, holds: Collection[Kind]) -> None:
        """`holds` as for PartCollector."""
        self.out = PartCollector(holds)
        self._text = ""
        self._at = 0
        self._ended = False
        self._read: list[str] = []
        self._steps = self.answer()

    @abstractmethod
    def answer(self) -> Steps[None]:
        """Reads the whole answer."""

    def push(self, text: str) -> Sequence[Part]:
        """The parts that `text` completes or continues."""
        self._text = self._text[self._at :] + text
        self._at = 0
        next(self._steps, None)
        return self.out.take()

    def flush(self) -> Sequence[Part]:
        """The parts that were held back, at the end of the answer."""
        self._ended = True
        next(self._steps, None)
        self.out.end()
        return self.out.take()

    # Reading of text.

    def more(self) -> Steps[bool]:
        """Whether the answer has more text."""
        while self._at == len(self._text):
            if self._ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character, empty at the end."""
        return self._text[self._at] if (yield from self.more()) else ""

    def follows(self, text: str) -> Steps[bool]:
        """Whether `text` follows, without reading it."""
        while (have := self._text[self._at : self._at + len(text)]) != text:
            if self._ended or not text.startswith(have):
                return False
            yield
        return True

    def literal(self, text: str) -> Steps[bool]:
        """Reads `text` if it follows."""
        found = yield from self.follows(text)
        if found:
            self._take(self._at + len(text))
        return found

    def expect(self, text: str) -> Steps[None]:
        """Reads `text`; raises NoCallError if it does not follow."""
        if not (yield from self.literal(text)):
            raise NoCallError

    def run(self, pattern: re.Pattern[str], most: int | None = None) -> Steps[str]:
        """Reads the characters that `pattern` (one or more of a set) matches, at most `most` + 1 of them."""
        found: list[str] = []
        length = 0
        while (most is None or length <= most) and (yield from self.more()):
            match = pattern.match(self._text, self._at)
            if match is None:
                break
            end = match.end() if most is None else min(match.end(), self._at + most + 1 - length)
            found.append(self._take(end))
            length += len(found[-1])
        return "".join(found)

    def space(self) -> Steps[None]:
        """Reads white space."""
        yield from self.run(_SPACE)

    def word(self, pattern: re.Pattern[str] = NAME) -> Steps[str]:
        """Reads a name without quotes; raises NoCallError if there is none or it is too long."""
        word = yield from self.run(pattern, MAX_NAME)
        if not 0 < len(word) <= MAX_NAME:
            raise NoCallError
        return word

    # Emitted text.

    def until(self, markers: Markers, kind: Kind) -> Steps[str]:
        """Emits text up to a marker, which is read and returned; empty at the end."""
        while (match := markers.search(self._text, self._at)) is None:
            self._show(kind, len(self._text) if self._ended else markers.unfinished(self._text, self._at))
            if self._ended:
                return ""
            yield
        self._show(kind, match.start())
        self._at = match.end()
        return match[0]

    def rest(self) -> Steps[None]:
        """Emits the rest of the answer as content."""
        while (yield from self.more()):
            self._show(Content, len(self._text))

    def thought(self, thinking: Thinking | None, opened: str) -> Steps[None]:
        """Emits the reasoning at the beginning of an answer. Later markers of reasoning are plain text."""
        if thinking is None:
            return
        place = thinking.place(opened)
        if place == "before":
            self._read.clear()
            yield from self.space()
            if not (yield from self.literal(thinking.begin)):
                self.give_back()
                return
        if not opened.endswith(TEXT_BEGUN):
            self.out.border()
        if place != "after" and (yield from self.until(Markers(thinking.end), Reasoning)):
            self.out.border()

    # Calls.

    def try_call(self, call: Steps[None], *before: str) -> Steps[bool]:
        """Reads a call. If the text is not a call, it is emitted as content, together with `before`, the text read
        ahead of it. If a call has begun, only the text after the call is content. Returns whether a call began.
        """
        count = self.out.calls
        self._read[:] = before
        try:
            yield from call
        except NoCallError:
            self.give_back()
        return self.out.calls > count

    def give_back(self, kind: Kind = Content) -> None:
        """Emits the text that was remembered for backtracking, as plain text."""
        self.out.text(kind, "".join(self._read))
        self._read.clear()

    def arguments(self, name: str, id: str = "", closing: Sequence[str] = ()) -> Steps[None]:
        """Begins a call and emits its arguments; raises NoCallError if no JSON object or known substitute follows.
        If one of `closing` follows, the arguments are empty.
        """
        if (yield from self.peek()) != "{":
            arguments = yield from self._stand_in(closing)
            self._begin(name, id)
            self.out.arguments(arguments)
            return
        self._begin(name, id)
        end, ended = ValueEnd(), False
        while not ended and (yield from self.more()):
            stop, ended = end.scan(self._text, self._at)
            self.out.arguments(self._text[self._at : stop])
            self._at = stop

    def calls(self, known: Collection[str] | None = None) -> Steps[None]:
        """Reads calls written as JSON objects: one, several with nothing, `,` or `;` in between, or a list of them.

        `known` are the accepted names; None accepts every name.
        """
        yield from self.space()
        listed = yield from self.literal("[")
        goes_on = True
        while goes_on:
            yield from self.space()
            yield from self.call(known)
            self._read.clear()
            yield from self.space()
            parted = (yield from self.literal(",")) or (yield from self.literal(";"))
            yield from self.space()
            goes_on = (yield from self.peek()) == "{"
        if parted:
            raise NoCallError
        if listed:
            yield from self.expect("]")

    def call(self, known: Collection[str] | None) -> Steps[None]:
        """Reads an object with a name and arguments in any order; arguments after the name are emitted as they arrive.

        Before the call begins only the keys of a call are accepted, so that other JSON is detected at its first key.
        Missing arguments, `{}`, null and an empty text are equal; a text that contains an object is that object. An
        `id` is ignored, because it would arrive after the arguments.
        """
        yield from self.expect("{")
        name: str | None = None
        earlier: str | None = None
        begun, goes_on = False, True
        while goes_on:
            yield from self.space()
            key = yield from self.string()
            yield from self.space()
            yield from self.expect(":")
            yield from self.space()
            if begun:
                yield from self._skip()
            elif key == "name":
                name = yield from self.string()
                if not name or (known is not None and name not in known):
                    raise NoCallError
                if earlier is not None:
                    self._begin(name, "")
                    self.out.arguments(earlier)
                    begun = True
            elif key in ("arguments", "parameters") and earlier is None:
                if name is None:
                    earlier = yield from self._object()
                else:
                    yield from self.arguments(name)
                    begun = True
            elif key in ("id", "type"):
                yield from self.string()
            else:
                raise NoCallError
            yield from self.space()
            goes_on = yield from self.literal(",")
        yield from self.expect("}")
        if name is None:
            raise NoCallError
        if not begun:
            self._begin(name, "")
            self.out.arguments("{}")

    def string(self) -> Steps[str]:
        """Reads a short JSON string."""
        yield from self.expect('"')
        written, escaped = ['"'], False
        while len(written) <= MAX_NAME and (yield from self.more()):
            char = self._take(self._at + 1)
            written.append(char)
            if char == '"' and not escaped:
                try:
                    text = str(json.loads("".join(written), strict=False))
                    text.encode()  # raises for half a surrogate pair
                except ValueError:
                    break
                return text
            escaped = char == "\\" and not escaped
        raise NoCallError

    def _object(self) -> Steps[str]:
        """Reads a complete JSON object, or a known substitute."""
        if (yield from self.peek()) != "{":
            return (yield from self._stand_in())
        text, whole = yield from self._value()
        if not whole:
            raise NoCallError
        return text

    def _stand_in(self, closing: Sequence[str] = ()) -> Steps[str]:
        """Reads a known substitute for an object of arguments; returns the object."""
        for text in closing:
            if (yield from self.follows(text)):
                return "{}"
        if (yield from self.peek()) != '"':
            if (yield from self.run(_SCALAR, len("null"))) != "null":
                raise NoCallError
            return "{}"
        written, _ = yield from self._value()
        return _written(_loaded(_loaded(written, str).strip() or "{}", dict))

    def _value(self) -> Steps[tuple[str, bool]]:
        """Reads a JSON object, array or string; returns its text, and whether it was complete."""
        end, ended = ValueEnd(), False
        read: list[str] = []
        while not ended and (yield from self.more()):
            stop, ended = end.scan(self._text, self._at)
            read.append(self._take(stop))
        return "".join(read), end.whole

    def _skip(self) -> Steps[None]:
        """Reads any JSON value."""
        if (yield from self.peek()) in ("{", "[", '"'):
            yield from self._value()
        else:
            yield from self.run(_SCALAR)

    def _begin(self, name: str, id: str) -> None:
        self._read.clear()
        self.out.begin(name, id)

    def _take(self, end: int) -> str:
        """Reads up to `end`, and remembers it for backtracking."""
        text = self._text[self._at : end]
        self._at = end
        self._read.append(text)
        return text

    def _show(self, kind: Kind, end: int) -> None:
        self.out.text(kind, self._text[self._at : end])
        self._at = end


def _loaded(text: str, kind: type[T]) -> T:
    """The JSON value in `text`; raises NoCallError if it has none, or one of another type than `kind`."""
    try:
        value = json.loads(text, strict=False)
        text.encode()
    except (ValueError, RecursionError):
        raise NoCallError from None
    if not isinstance(value, kind):
        raise NoCallError
    return value


def _written(value: Any) -> str:
    """`value` as valid JSON; raises NoCallError if it cannot be encoded."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # raises for half a surrogate pair
    except (ValueError, RecursionError):
        raise NoCallError from None
    return text


class CallReader(Reader):
    """A parser of optional reasoning, then text, with calls if there are tools."""

    def __init__(self, thinking: Thinking | None, opened: str, tools: Sequence[Tool]) -> None:
        """`opened` is the end of the prompt, which may contain the beginning of the answer."""
        super().__init__((Reasoning, Content) if tools else (Reasoning,))
        self._thinking = thinking
        self._opened = opened
        self._tools = {tool.name: tool for tool in tools}

    def answer(self) -> Steps[None]:
        """The whole answer."""
        yield from self.thought(self._thinking, self._opened)
        if self._tools:
            yield from self.called()
        yield from self.rest()

    @abstractmethod
    def called(self) -> Steps[None]:
        """Reads text and calls."""
